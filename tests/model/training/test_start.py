"""What a run begins with, and the mistakes that are found before any training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from app.errors import InvalidOption
from model.training.config import RunConfig
from model.training.config_file import load_run_config
from model.training.data import prepared_sources
from model.training.objective import smoothed_cross_entropy
from model.training.processes import Processes
from model.training.start import GivenModels, settle_vocabulary, starting_model

NOTHING_GIVEN = GivenModels(None, None)
WORDS = ["ana", "bia", "carla", "dora", "eva", "fani", "gil", "helena", "ida", "jana"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pairs = [(f"{a} sees {b} now", f"{b} vê {a} agora") for a in WORDS for b in WORDS]
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    (tmp_path / "dev.en").write_text("ana sees bia now\nida sees eva now\n", encoding="utf-8")
    (tmp_path / "dev.pt").write_text("bia vê ana agora\neva vê ida agora\n", encoding="utf-8")
    return tmp_path


def config_of(folder: Path, *, size: int = 24, more: str = "") -> RunConfig:
    (folder / "run.toml").write_text(
        f"""
source = "en"
target = "pt"
output = "run"
[model]
d_model = 16
num_heads = 2
encoder_layers = 1
decoder_layers = 1
ffn_size = 16
[vocabulary]
size = {max(size, 64)}
byte_fallback = false
[data.filters]
off = ["language"]
[[data.source]]
name = "pairs"
path = "pairs.tsv"
{more}
""",
        encoding="utf-8",
    )
    config = load_run_config(folder / "run.toml")
    assert config.vocabulary is not None
    vocabulary = config.vocabulary.model_copy(update={"size": size})
    (folder / "run").mkdir(exist_ok=True)
    return config.model_copy(update={"vocabulary": vocabulary})


def test_sentences_that_judge_a_run_are_not_trained_on(folder: Path) -> None:
    config = config_of(folder, more='[dev]\nsource_path = "dev.en"\ntarget_path = "dev.pt"')
    vocabulary = settle_vocabulary(config, NOTHING_GIVEN, Processes(), say=lambda _: None)
    (source,) = prepared_sources(
        config, vocabulary.tokenizer, vocabulary.path, Processes(), say=lambda _: None
    )
    assert len(source.pairs) == 98
    counts = json.loads((folder / "run" / "data.json").read_text())
    assert counts["pairs"]["rejected"] == {"excluded": 2}


def test_a_vocabulary_that_was_trained_for_other_choices_is_not_taken(folder: Path) -> None:
    config = config_of(folder, size=24)
    first = settle_vocabulary(config, NOTHING_GIVEN, Processes(), say=lambda _: None)
    again = settle_vocabulary(config, NOTHING_GIVEN, Processes(), say=lambda _: None)
    assert first.path.read_bytes() == again.path.read_bytes()
    with pytest.raises(InvalidOption, match="trained for another"):
        settle_vocabulary(config_of(folder, size=22), NOTHING_GIVEN, Processes(), say=lambda _: None)


def test_a_vocabulary_without_an_end_is_refused_before_anything_is_written(folder: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "pairs.tsv"),
        model_prefix=str(folder / "other"),
        vocab_size=40,
        eos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    config = config_of(folder)
    assert config.vocabulary is not None
    named = config.vocabulary.model_copy(update={"path": folder / "other.model"})
    with pytest.raises(InvalidOption, match="no end-of-sentence piece"):
        settle_vocabulary(
            config.model_copy(update={"vocabulary": named}), NOTHING_GIVEN, Processes(), say=lambda _: None
        )
    assert list((folder / "run").iterdir()) == []


def test_somebody_elses_vocabulary_keeps_its_own_end(folder: Path) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "pairs.tsv"),
        model_prefix=str(folder / "stock"),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    config = config_of(folder)
    assert config.vocabulary is not None
    named = config.vocabulary.model_copy(update={"path": folder / "stock.model"})
    config = config.model_copy(update={"vocabulary": named})
    vocabulary = settle_vocabulary(config, NOTHING_GIVEN, Processes(), say=lambda _: None)
    assert vocabulary.tokenizer.eos_id == 2
    assert starting_model(config, NOTHING_GIVEN, vocabulary.tokenizer).config.eos_id == 2


def test_dropout_can_be_set_for_a_run(folder: Path) -> None:
    config = config_of(folder, more="[training]\ndropout = 0.3")
    vocabulary = settle_vocabulary(config, NOTHING_GIVEN, Processes(), say=lambda _: None)
    model = starting_model(config, NOTHING_GIVEN, vocabulary.tokenizer)
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.3}


def test_an_unknown_piece_that_is_never_said_does_not_drown_label_smoothing() -> None:
    logits = torch.tensor([[0.5, -1e9, 1.5, -0.5]])
    target = torch.tensor([2])
    total, plain = smoothed_cross_entropy(logits, target, smoothing=0.1, unknown_id=1)
    log_probs = logits[:, [0, 2, 3]].log_softmax(1)
    expected = 0.9 * -log_probs[0, 1] + 0.1 * -log_probs.mean()
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    assert plain == pytest.approx(float(-log_probs[0, 1]), rel=1e-6)


def test_a_byte_order_mark_is_no_part_of_the_first_cell(folder: Path) -> None:
    marked = folder / "marked.tsv"
    marked.write_bytes(b"\xef\xbb\xbf" + (folder / "pairs.tsv").read_bytes())
    shutil.move(marked, folder / "pairs.tsv")
    config = config_of(folder, more='where = { "1" = ["ana sees ana now"] }\n')
    vocabulary = settle_vocabulary(config_of(folder), NOTHING_GIVEN, Processes(), say=lambda _: None)
    (source,) = prepared_sources(
        config, vocabulary.tokenizer, vocabulary.path, Processes(), say=lambda _: None
    )
    assert len(source.pairs) == 1
