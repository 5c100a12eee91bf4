"""From a model folder to a bundle and back: `dragoman export trained` and `dragoman export weights`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options, tiny_shortlist, tiny_texts, tiny_tokenizer
from typer.testing import CliRunner

import exporters.cli as cli_module
from app.bundle import Bundle, open_bundle
from app.bundle.manifest import LanguagePair
from app.decoding.shortlist import Shortlist
from app.errors import CheckpointError, DragomanError, InvalidOption
from exporters.checkpoint import Checkpoint, QuantizedWeight
from exporters.export import export_bundle
from exporters.torch_reference import to_module
from exporters.trained import to_checkpoint, to_saved_model, with_activation_scales
from model.saved_model import SavedModel, load_model, save_model


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def tiny_model(**changes: object) -> SavedModel:
    checkpoint = tiny_checkpoint(**changes)  # type: ignore[arg-type]
    return SavedModel(
        config=checkpoint.config,
        weights=to_module(checkpoint).state_dict(),
        tokenizer=checkpoint.tokenizer,
        source="en",
        target="pt",
        provenance={"run": "7", "licence": "CC0-1.0"},
        max_source_tokens=40,
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with static activation scales and a shortlist."""
    checkpoint = tiny_checkpoint(shortlist=True, decoder_cell="ssru")
    matrices = [name for name, weight in checkpoint.weights.items() if np.ndim(weight) == 2]  # type: ignore[arg-type]
    checkpoint = dataclasses.replace(checkpoint, activation_scales=dict.fromkeys(matrices, 0.04))
    return export_bundle(checkpoint, tmp_path_factory.mktemp("teacher") / "b", tiny_options("teacher"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(tiny_texts()), encoding="utf-8")
    return path


def run(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "400"}).invoke(cli_module.app, [*map(str, arguments)])
    if isinstance(result.exception, DragomanError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stderr


def same_matrices(ours: Checkpoint, theirs: Checkpoint, *, of: str) -> bool:
    for name, weight in ours.weights.items():
        other = theirs.weights[name]
        if name.startswith(of) and isinstance(weight, QuantizedWeight):
            assert isinstance(other, QuantizedWeight)
            if not np.array_equal(weight.to_float(), other.to_float()):
                return False
    return True


def test_a_trained_model_becomes_a_verified_bundle(tmp_path: Path, texts: Path) -> None:
    save_model(tiny_model(), tmp_path / "m")
    tiny_shortlist().save(tmp_path / "list.bin")
    words = run(
        *("trained", tmp_path / "m", "--out", tmp_path / "b", "--shortlist", tmp_path / "list.bin"),
        *("--verify-with", texts, "--calibrate-with", texts, "--calibrate-with", texts),
    )
    assert "calibrating on 24 sentences, which is few" in words
    assert "cpu-fp32: 12 of 12 segments as PyTorch" in words
    bundle = open_bundle(tmp_path / "b")
    manifest = bundle.manifest
    assert (manifest.id, manifest.licence) == ("b", "CC0-1.0")
    assert manifest.pairs == (LanguagePair(source="en", target="pt"),)
    assert (manifest.limits.max_source_tokens, manifest.limits.max_target_tokens) == (40, 120)
    assert manifest.provenance["run"] == "7"
    assert manifest.provenance["matrices_already_int8"].startswith("0 of ")
    assert manifest.shortlist is not None
    assert Shortlist.load(bundle.file(manifest.shortlist)) == tiny_shortlist()
    assert "Rounded to int8" in bundle.file("MODEL_CARD.md").read_text(encoding="utf-8")


def test_options_go_before_what_the_folder_states(tmp_path: Path, texts: Path) -> None:
    save_model(tiny_model(), tmp_path / "m")
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({"origin": "Trained at home.", "changes": "None."}))
    run(
        *("trained", tmp_path / "m", "--out", tmp_path / "b", "--id", "mine", "--licence", "MIT"),
        *("--facts", facts, "--max-source-tokens", 32, "--verify-with", texts, "--variants", "cpu-fp32"),
    )
    manifest = open_bundle(tmp_path / "b").manifest
    assert (manifest.id, manifest.licence, manifest.shortlist) == ("mine", "MIT", None)
    assert manifest.limits.max_source_tokens == 32
    assert list(manifest.variants) == ["cpu-fp32"]
    assert "Trained at home." in (tmp_path / "b" / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_without_texts_those_of_the_language_serve_and_that_is_said(tmp_path: Path) -> None:
    save_model(dataclasses.replace(tiny_model(), max_source_tokens=None), tmp_path / "m")
    words = run("trained", tmp_path / "m", "--out", tmp_path / "b", "--variants", "cpu-fp32")
    assert "calibrating on 53 sentences, which is few; --calibrate-with" in words
    assert open_bundle(tmp_path / "b").manifest.limits.max_source_tokens == 128


def test_a_bundle_becomes_a_model_folder_that_computes_the_same(teacher: Bundle, tmp_path: Path) -> None:
    words = run("weights", teacher.path, tmp_path / "m")
    assert "weights of teacher in" in words
    saved = load_model(tmp_path / "m")
    assert (saved.source, saved.target) == ("en", "pt")
    assert (saved.max_source_tokens, saved.max_target_tokens) == (40, 24)
    assert saved.provenance["weights_of_bundle"] == "teacher"
    assert saved.provenance["licence"] == "CC0-1.0"
    assert saved.tokenizer == tiny_tokenizer()
    assert saved.weights["output_bias"][1] == -1e9


def test_a_bundle_s_weights_go_back_into_a_bundle_without_loss(
    teacher: Bundle, tmp_path: Path, texts: Path
) -> None:
    run("weights", teacher.path, tmp_path / "m")
    run(
        *("trained", tmp_path / "m", "--out", tmp_path / "b", "--shortlist-of", teacher.path),
        *("--verify-with", texts),
    )
    again = open_bundle(tmp_path / "b")
    before, after = to_saved_model(teacher), to_saved_model(again)
    assert all(torch.equal(after.weights[name], tensor) for name, tensor in before.weights.items())
    num_kept, num_all = again.manifest.provenance["matrices_already_int8"].split(" of ")
    assert num_kept == num_all
    shortlists = [Shortlist.load(b.file(str(b.manifest.shortlist))) for b in (teacher, again)]
    assert shortlists[0] == shortlists[1]


def test_a_student_keeps_its_teacher_s_encoder_bit_for_bit(teacher: Bundle) -> None:
    """Training changed the decoder alone."""
    frozen = to_saved_model(teacher)
    moved = {
        name: tensor + 0.01 * torch.randn_like(tensor) if name.startswith("decoder") else tensor
        for name, tensor in frozen.weights.items()
    }
    student = to_checkpoint(dataclasses.replace(frozen, weights=moved))
    original = to_checkpoint(frozen)
    for part in ("encoder", "embedding"):
        assert same_matrices(student, original, of=part)
    assert not same_matrices(student, original, of="decoder")


def test_calibration_gives_every_matrix_a_scale_and_leaves_out_what_is_too_long() -> None:
    checkpoint = to_checkpoint(tiny_model())
    texts = [*tiny_texts(), "abc " * 60]
    ready = with_activation_scales(checkpoint, texts, max_source_tokens=40)
    matrices = {name for name, weight in ready.weights.items() if isinstance(weight, QuantizedWeight)}
    assert ready.activation_scales.keys() == matrices
    assert ready.provenance["calibration_segments"] == "12"
    with pytest.raises(
        InvalidOption, match="none of the 1 sentences to calibrate with has at most 40 tokens"
    ):
        with_activation_scales(checkpoint, texts[-1:], max_source_tokens=40)


def test_mistakes_are_named_before_any_work(
    teacher: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> Checkpoint:
        raise AssertionError("the work began")

    monkeypatch.setattr(cli_module, "to_checkpoint", never)
    folder, out, listed = tmp_path / "m", tmp_path / "b", tmp_path / "list.bin"
    save_model(tiny_model(), folder)
    save_model(tiny_model(vocabulary_size=80), tmp_path / "other")
    tiny_shortlist().save(listed)
    (tmp_path / "empty").write_text(" \n")
    for arguments, kind, words in (
        ([tmp_path / "none"], CheckpointError, r"no model\.json"),
        ([folder, "--variants", "cpu-int4"], InvalidOption, "--variants has cpu-int4"),
        ([folder, "--facts", listed], InvalidOption, "not a JSON object of origin"),
        ([folder, "--calibrate-with", tmp_path / "empty"], CheckpointError, "no sentence"),
        ([folder, "--shortlist", listed, "--shortlist-of", teacher.path], InvalidOption, "give one"),
        ([tmp_path / "other", "--shortlist-of", teacher.path], InvalidOption, "another vocabulary"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            run("trained", *arguments, "--out", out)
    with pytest.raises(InvalidOption, match="exists; name a new folder"):
        run("trained", folder, "--out", folder)
    assert not out.exists()


def test_a_shortlist_of_another_size_or_a_bundle_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="for a vocabulary of 80 tokens, the model has 96"):
        to_checkpoint(tiny_model(), shortlist=tiny_shortlist(80))
    options = dataclasses.replace(tiny_options("bare", ("cpu-fp32",)), verification_texts=tiny_texts()[:1])
    bare = export_bundle(tiny_checkpoint(), tmp_path / "bare", options)
    save_model(tiny_model(), tmp_path / "m")
    with pytest.raises(InvalidOption, match="bundle bare has none"):
        run("trained", tmp_path / "m", "--out", tmp_path / "b", "--shortlist-of", bare.path)


def test_a_bundle_of_several_directions_is_no_model_folder(teacher: Bundle) -> None:
    pairs = (LanguagePair(source="en", target="pt"), LanguagePair(source="en", target="es"))
    several = Bundle(teacher.path, teacher.manifest.model_copy(update={"pairs": pairs}))
    with pytest.raises(CheckpointError, match="translates 2 directions"):
        to_saved_model(several)
