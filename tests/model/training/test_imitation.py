"""The steps before the first, in which a student learns its teacher's recurrences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from model.data.batches import WeightedSource
from model.distillation import recurrence
from model.distillation.initialisation import student_of
from model.training.config import RunConfig
from model.training.imitation import has_recurrences_to_imitate, imitate_teacher
from model.training.processes import Processes
from model.training.run import _fingerprint
from model.transformer import Transformer
from tests.model.training.conftest import reversed_pairs

ModelMaker = Callable[..., Transformer]


@pytest.fixture(autouse=True)
def _small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence, "_SAMPLE_TOKENS", 2000)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**distillation: object) -> RunConfig:
        return RunConfig.model_validate(
            {
                "source": "en",
                "target": "pt",
                "output": tmp_path,
                "data": {"source": [{"name": "toy", "path": tmp_path / "toy.tsv"}]},
                "training": {"batch_tokens": 120},
                "distillation": {"teacher": tmp_path / "teacher", "fit_steps": 30} | distillation,
            }
        )

    return make


def begun(
    make_model: ModelMaker, config: RunConfig, said: list[str], processes: Processes | None = None
) -> Transformer:
    torch.manual_seed(3)
    teacher = make_model(decoder_cell="ssru", d_model=32, num_heads=4)
    student = student_of(teacher)
    sources = [WeightedSource(reversed_pairs(60, seed=1), 1.0)]
    imitate_teacher(config, student, teacher, sources, processes or Processes(), say=said.append)
    return student


def test_it_says_layer_by_layer_how_near_it_came(
    make_model: ModelMaker, make_run: Callable[..., RunConfig]
) -> None:
    said: list[str] = []
    begun(make_model, make_run(), said)
    first, *fits = said
    assert first.startswith("fitting self-attention to the recurrence: 30 steps")
    assert [line.partition(":")[0] for line in fits] == ["decoder layer 0", "decoder layer 1"]
    assert all("% of the recurrence's variance unexplained after 30 steps" in line for line in fits)


def test_a_run_that_begins_again_begins_with_the_same_weights(
    make_model: ModelMaker, make_run: Callable[..., RunConfig]
) -> None:
    first, second = (begun(make_model, make_run(), []).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_process_learns_nothing_and_takes_the_weights_of_the_first(
    make_model: ModelMaker, make_run: Callable[..., RunConfig]
) -> None:
    first = begun(make_model, make_run(), [])

    class Second(Processes):
        def share(self, tensors: Sequence[torch.Tensor]) -> None:
            for mine, theirs in zip(tensors, first.parameters(), strict=True):
                mine.copy_(theirs.data)

    said: list[str] = []
    second = begun(make_model, make_run(), said, Second(rank=1, count=2))
    assert said == []
    weights = first.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in second.state_dict().items())


def test_without_steps_it_has_nothing_to_say(
    make_model: ModelMaker, make_run: Callable[..., RunConfig]
) -> None:
    said: list[str] = []
    begun(make_model, make_run(fit_steps=0), said)
    assert said == []


def test_only_a_copy_of_a_recurrent_teacher_at_its_beginning_has_something_to_imitate(
    make_model: ModelMaker, make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    recurrent, attentive = make_model(decoder_cell="ssru"), make_model()
    assert has_recurrences_to_imitate(make_run(), recurrent)
    assert not has_recurrences_to_imitate(make_run(), attentive)
    other_start = RunConfig.model_validate(
        make_run().model_dump(exclude_unset=True)
        | {
            "initial": tmp_path / "m",
            "distillation": {"teacher": tmp_path / "teacher", "from_teacher": False},
        }
    )
    assert not has_recurrences_to_imitate(other_start, recurrent)
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    assert not has_recurrences_to_imitate(make_run(), recurrent)


def test_a_run_does_not_go_on_with_another_number_of_rounds(make_run: Callable[..., RunConfig]) -> None:
    sources = [WeightedSource(reversed_pairs(20, seed=1), 1.0)]
    once, twice, thrice = (_fingerprint(make_run(rounds=rounds), sources) for rounds in (1, 2, 3))
    assert len({once, twice, thrice}) == 3
    assert _fingerprint(make_run(), sources) == once
