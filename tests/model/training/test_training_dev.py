from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sacrebleu
import sentencepiece
import torch

from app.errors import InvalidOption
from app.text import Tokenizer
from model.config import TransformerConfig
from model.data.batches import padded, padded_batch
from model.greedy import greedy
from model.training.checkpoint import checkpoints_of, step_of
from model.training.config import DevSection
from model.training.dev import DevScores, DevSet
from model.training.metrics import read_metrics
from model.training.objective import LabelSmoothing
from model.training.trainer import Judge
from model.transformer import Transformer
from tests.model.training.conftest import VOCABULARY, TrainerMaker

WORDS = [f"{first}{second}" for first in "bdgk" for second in "aeiou"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS, k=6)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "toy"),
        vocab_size=VOCABULARY,
        model_type="unigram",
        eos_id=0,
        unk_id=1,
        bos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    return Tokenizer.open(folder / "toy.model", eos_id=0)


@pytest.fixture
def section(tmp_path: Path) -> DevSection:
    draw = random.Random(2)
    for name in ("dev.src", "dev.tgt"):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(1, 5))) for _ in range(60)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return DevSection(
        source_path=tmp_path / "dev.src", target_path=tmp_path / "dev.tgt", every_steps=2, max_sentences=55
    )


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_the_scores_are_those_of_the_sentences_one_by_one(
    section: DevSection,
    tokenizer: Tokenizer,
    make_config: Callable[..., TransformerConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model.training.dev._BATCH_SENTENCES", 3)
    monkeypatch.setattr("model.training.dev._MAX_STEPS_PER_SOURCE_TOKEN", 1.5)
    model = Transformer(make_config(dropout=0.5)).train()
    with torch.no_grad():
        model.output_bias[0] += 0.6  # an untrained model that ends its sentences
    scores = DevSet(section.model_copy(update={"max_sentences": 7}), tokenizer, max_tokens=100).evaluate(
        model
    )
    assert model.training

    model.eval()
    pairs = sorted(zip(lines(section.source_path)[:7], lines(section.target_path)[:7], strict=True),
                   key=lambda pair: len(tokenizer.encode_sources([pair[0]])[0]))  # fmt: skip
    total, num_tokens = 0.0, 0
    translations = []
    for place, (source, reference) in enumerate(pairs):
        (source_ids,), (target_ids,) = (
            tokenizer.encode_sources([source]),
            tokenizer.encode_sources([reference]),
        )
        loss = LabelSmoothing()(model, padded_batch([(source_ids, target_ids)]), step=0)
        total, num_tokens = total + loss.total.item(), num_tokens + loss.num_tokens
        # The longest source of three sets the limit for all of them.
        longest = max(
            len(tokenizer.encode_sources([pairs[n][0]])[0]) for n in range(7) if n // 3 == place // 3
        )
        (row,) = greedy(model, *padded([source_ids]), max_steps=int(1.5 * longest) + 1)
        translations.append(tokenizer.decode(list(row.token_ids)))
    assert any(translations)
    assert scores.loss == pytest.approx(total / num_tokens, rel=1e-5)
    references = [reference for _, reference in pairs]
    assert scores.bleu == pytest.approx(sacrebleu.corpus_bleu(translations, [references]).score)


def test_without_decoding_there_is_no_bleu(
    section: DevSection, tokenizer: Tokenizer, make_config: Callable[..., TransformerConfig]
) -> None:
    section = section.model_copy(update={"decode": False})
    scores = DevSet(section, tokenizer, max_tokens=100).evaluate(Transformer(make_config()))
    assert scores.bleu is None
    assert scores.loss > 0


def test_sentences_that_are_too_long_are_left_out(section: DevSection, tokenizer: Tokenizer) -> None:
    everything = DevSet(section, tokenizer, max_tokens=100)
    short = DevSet(section, tokenizer, max_tokens=8)
    assert 0 < len(short) < len(everything)
    with pytest.raises(InvalidOption, match="no sentence of at most 1 tokens"):
        DevSet(section, tokenizer, max_tokens=1)


def test_files_of_different_lengths_are_refused(section: DevSection, tokenizer: Tokenizer) -> None:
    section.target_path.write_text("bada\n")
    with pytest.raises(InvalidOption, match=r"has 60 lines and .* has 1;"):
        DevSet(section, tokenizer, max_tokens=100)


def test_a_missing_file_is_refused(section: DevSection, tokenizer: Tokenizer) -> None:
    section.target_path.unlink()
    with pytest.raises(InvalidOption, match=r"dev\.tgt cannot be read"):
        DevSet(section, tokenizer, max_tokens=100)


def test_an_evaluation_does_not_disturb_the_training(
    section: DevSection, tokenizer: Tokenizer, make_trainer: TrainerMaker, tmp_path: Path
) -> None:
    judge = Judge(DevSet(section, tokenizer, max_tokens=100), section)
    judged, alone = make_trainer("judged", judge=judge), make_trainer("alone")
    judged.run()
    alone.run()
    assert [step for step, _ in judged.state.evaluations] == [2, 4, 6, 8, 10, 12]
    result = alone.result()
    assert all(torch.equal(result[name], tensor) for name, tensor in judged.result().items())
    rows = read_metrics(tmp_path / "judged" / "metrics.jsonl")
    assert all(isinstance(value, int | float) for row in rows for value in row.values())
    assert set().union(*rows) == {  # nothing of the text
        *("step", "time_s", "dev_loss", "dev_bleu", "loss", "cross_entropy", "gradient_norm"),
        *("learning_rate", "target_tokens", "tokens_per_s", "source_tokens_per_s"),
    }


def test_a_model_trains_on_after_sentences_longer_than_its_table_of_positions(
    tmp_path: Path, tokenizer: Tokenizer, make_trainer: TrainerMaker
) -> None:
    for name in ("dev.src", "dev.tgt"):
        (tmp_path / name).write_text(" ".join(WORDS * 20) + "\n")
    section = DevSection(
        source_path=tmp_path / "dev.src", target_path=tmp_path / "dev.tgt", every_steps=1, decode=False
    )
    judge = Judge(DevSet(section, tokenizer, max_tokens=5000), section)
    trainer = make_trainer("run", judge=judge, max_steps=2)
    trainer.run()
    assert trainer._model.positions.table.shape[0] > 512
    assert trainer.state.step == 2


class _Scripted:
    """In the place of a dev set: its losses are given."""

    def __init__(self, losses: list[float]) -> None:
        self._losses: Iterator[float] = iter(losses)

    def evaluate(self, model: Transformer) -> DevScores:
        return DevScores(next(self._losses), bleu=None)


def judged_by(section: DevSection, losses: list[float], **changes: object) -> Judge:
    return Judge(_Scripted(losses), section.model_copy(update=changes))  # type: ignore[arg-type]


def test_a_run_stops_when_the_dev_set_has_not_improved_for_its_patience(
    section: DevSection, make_trainer: TrainerMaker, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = judged_by(section, [5.0, 3.0, 4.0, 3.0, 2.0], every_steps=1, patience=2)
    trainer = make_trainer("run", judge=judge)
    trainer.run()
    assert trainer.state.step == 4  # an equal value is no improvement
    assert "not improved for 2 evaluations" in capsys.readouterr().err


def test_a_run_that_stopped_early_stays_stopped(
    section: DevSection, make_trainer: TrainerMaker, tmp_path: Path
) -> None:
    first = make_trainer("run", judge=judged_by(section, [1.0, 2.0, 3.0], every_steps=1, patience=2))
    first.run()
    again = make_trainer("run", judge=judged_by(section, [], every_steps=1, patience=2))
    again.run()
    assert first.state.step == again.state.step == 3
    assert [step_of(path) for path in checkpoints_of(tmp_path / "run" / "checkpoints")][-1] == 3


def test_an_improvement_starts_the_patience_anew(section: DevSection, make_trainer: TrainerMaker) -> None:
    losses = [5.0, 6.0, 4.0, 5.0, 3.0, 4.0, 4.0, 1.0]
    trainer = make_trainer("run", judge=judged_by(section, losses, every_steps=1, patience=2))
    trainer.run()
    assert trainer.state.step == 7


def test_the_best_checkpoints_are_kept_and_averaged(
    section: DevSection, make_trainer: TrainerMaker, tmp_path: Path
) -> None:
    losses = [5.0, 1.0, 4.0, 2.0, 3.0, 6.0]  # at steps 2, 4, 6 ... 12
    trainer = make_trainer(
        "run",
        judge=judged_by(section, losses),
        average=2,
        average_of="best",
        keep_checkpoints=1,
        checkpoint_every_steps=100,
    )
    saved = {}
    save = trainer._save

    def noting() -> None:
        save()
        saved[trainer.state.step] = {
            name: tensor.clone() for name, tensor in trainer._model.state_dict().items()
        }

    trainer._save = noting  # type: ignore[method-assign]
    trainer.run()
    found = [step_of(path) for path in checkpoints_of(tmp_path / "run" / "checkpoints")]
    assert set(found) >= {4, 8, 12}
    assert trainer.result_steps() == [4, 8]
    for name, tensor in trainer.result().items():
        torch.testing.assert_close(tensor, (saved[4][name] + saved[8][name]) / 2)


def test_the_best_checkpoint_outlives_newer_ones(
    section: DevSection, make_trainer: TrainerMaker, tmp_path: Path
) -> None:
    trainer = make_trainer(
        "run",
        judge=judged_by(section, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        keep_checkpoints=1,
        checkpoint_every_steps=3,
    )
    trainer.run()
    assert [step_of(path) for path in checkpoints_of(tmp_path / "run" / "checkpoints")] == [2, 12]


def test_without_a_judge_no_checkpoint_is_the_best_and_the_last_is_taken(make_trainer: TrainerMaker) -> None:
    trainer = make_trainer("run", average_of="best", max_steps=3)
    trainer.run()
    assert all(
        torch.equal(tensor, trainer._model.state_dict()[name]) for name, tensor in trainer.result().items()
    )


def test_what_decides_is_made_such_that_more_is_better(section: DevSection) -> None:
    by_loss = judged_by(section, [])
    by_bleu = judged_by(section, [], stop_by="bleu")
    good, bad = DevScores(1.0, 10.0), DevScores(2.0, 20.0)
    assert by_loss.value(good) > by_loss.value(bad)
    assert by_bleu.value(good) < by_bleu.value(bad)
    assert by_loss.value(bad) > by_loss.value(DevScores(float("nan"), None))


def test_a_resumed_run_evaluates_its_remaining_steps_only(
    section: DevSection, tokenizer: Tokenizer, make_trainer: TrainerMaker, tmp_path: Path
) -> None:
    judge = Judge(DevSet(section, tokenizer, max_tokens=100), section)
    make_trainer("run", judge=judge, max_steps=6).run()
    trainer = make_trainer("run", judge=judge, max_steps=12)
    trainer.run()
    assert [step for step, _ in trainer.state.evaluations] == [2, 4, 6, 8, 10, 12]
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "dev_loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
