"""`dragoman plot` from the outside: every command draws, and refuses before it works in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import VOCABULARY_SIZE, tiny_tokenizer
from typer.testing import CliRunner, Result

from app.errors import CheckpointError, InvalidOption
from model.figures import cli, complexity, translation_time
from model.saved_model import SavedModel, save_model
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]


@pytest.fixture
def plot() -> Callable[..., Result]:
    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def make_folder(make_model: ModelMaker, tmp_path: Path) -> Callable[..., Path]:
    def make(**changes: object) -> Path:
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "num_heads": 1}
        model = make_model(vocabulary_size=VOCABULARY_SIZE, **sizes, **changes)
        saved = SavedModel(model.config, model.state_dict(), tiny_tokenizer(), source="en", target="pt")
        save_model(saved, tmp_path / "model")
        return tmp_path / "model"

    return make


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_positions_draws_two_figures(plot: Callable[..., Result], tmp_path: Path) -> None:
    assert (
        plot("positions", "--width", 8, "--positions", 9, "--distance", 4, "--out", tmp_path / "p").exit_code
        == 0
    )
    assert names(tmp_path / "p") == {"positions-codes.png", "positions-distance.png"}


def test_one_figure_goes_to_a_file(plot: Callable[..., Result], tmp_path: Path) -> None:
    plot("positions", "--width", 8, "--only", "distance", "--distance", 4, "--out", tmp_path / "d.svg")
    assert (tmp_path / "d.svg").read_text().startswith("<?xml")


def test_an_odd_width_is_refused(plot: Callable[..., Result], tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--width is 7"):
        plot("positions", "--width", 7, "--out", tmp_path)


def test_scaling_draws_one_figure(plot: Callable[..., Result], tmp_path: Path) -> None:
    plot("scaling", "--max-head-size", 4, "--out", tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")


def test_attention_draws_all_three_kinds(
    plot: Callable[..., Result], make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    plot("attention", make_folder(), "--text", "a", "--out", tmp_path / "a", "--format", "svg")
    assert names(tmp_path / "a") == {f"attention-{kind}.svg" for kind in ("encoder", "decoder", "cross")}


def test_attention_of_a_recurrent_decoder_leaves_its_figure_out_and_says_so(
    plot: Callable[..., Result], make_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_folder(decoder_cell="ssru")
    result = plot("attention", folder, "--text", "a", "--out", tmp_path / "a")
    assert names(tmp_path / "a") == {"attention-encoder.png", "attention-cross.png"}
    assert "has no self-attention" in " ".join(result.output.split())
    with pytest.raises(InvalidOption, match="SSRU"):
        plot("attention", folder, "--only", "decoder", "--out", tmp_path / "b")


def test_a_blank_text_is_refused(plot: Callable[..., Result], tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--text is blank"):
        plot("attention", tmp_path, "--text", " ", "--out", tmp_path / "a")


def test_a_folder_without_a_model_is_named(plot: Callable[..., Result], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model folder"):
        plot("attention", tmp_path, "--out", tmp_path / "a")


def test_curves_draws_several_runs(plot: Callable[..., Result], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "time_s": 1, "loss": 2}\n')
    out = tmp_path / "c.png"
    plot("curves", tmp_path / "one", tmp_path / "two", "--against", "time", "--metric", "loss", "--out", out)
    assert out.stat().st_size > 1000


def test_time_measures_a_model_and_prints_the_fit(
    plot: Callable[..., Result],
    make_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(translation_time, "TRANSLATION_LENGTHS", (1, 2, 4))
    monkeypatch.setattr(translation_time, "ENCODER_LENGTHS", (1, 2, 4))
    result = plot("time", make_folder(), "--repeats", 1, "--out", tmp_path / "t.png")
    assert result.stdout.count("residual") == 2
    assert (tmp_path / "t.png").is_file()


def test_complexity_prints_the_measured_table(
    plot: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complexity, "LENGTHS", (8, 16))
    monkeypatch.setattr(complexity, "WIDTHS", (8, 16))
    monkeypatch.setattr(complexity, "FIXED_LENGTH", 16)
    monkeypatch.setattr(complexity, "FIXED_WIDTH", 16)
    result = plot("complexity", "--repeats", 1, "--out", tmp_path / "c.svg")
    assert result.stdout.splitlines()[0] == "layer\tn\td\ttime_ms\tkept_MiB"
    assert len(result.stdout.splitlines()) == 1 + 4 * 3
    assert (tmp_path / "c.svg").is_file()


def test_an_existing_figure_is_refused_before_anything_is_measured(
    plot: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "complexity.png").write_text("old")
    monkeypatch.setattr(complexity, "measure_costs", lambda *_, **__: pytest.fail("measured in vain"))
    with pytest.raises(InvalidOption, match="--force"):
        plot("complexity", "--out", tmp_path)
