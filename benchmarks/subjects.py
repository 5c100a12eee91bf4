"""The models of the decoding benchmark and what each is measured on, for a quick run and for a full one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.random_model import BASE, random_checkpoint
from benchmarks.student import read_student
from benchmarks.testsets import load
from benchmarks.twin_models import MAX_TARGET_TOKENS, TwinModels, export_student, export_twins
from benchmarks.workload import Workload, forced, forced_mix, natural

_SEED = 20_24
_FORCED_LENGTH = 25
_NUM_CALIBRATION_TEXTS = 200


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        num_sentences: of the real test set; None is all.
        num_alone: of those, translated alone.
        num_rounds: of every contest.
        num_forced: sentences of 25 tokens for the base model.
        num_mix_blocks: blocks of 32 sentences of mixed lengths for it.
        num_forced_alone: of the sentences of 25 tokens, translated alone.
        num_compared: sentences compared in float32.
        num_profiled: sentences of the breakdown under load.
    """

    num_sentences: int | None
    num_alone: int
    num_rounds: int
    num_forced: int
    num_mix_blocks: int
    num_forced_alone: int
    num_compared: int
    num_profiled: int


QUICK = Plan(
    num_sentences=128,
    num_alone=12,
    num_rounds=3,
    num_forced=64,
    num_mix_blocks=2,
    num_forced_alone=4,
    num_compared=32,
    num_profiled=96,
)
FULL = Plan(
    num_sentences=None,
    num_alone=48,
    num_rounds=5,
    num_forced=256,
    num_mix_blocks=8,
    num_forced_alone=16,
    num_compared=200,
    num_profiled=256,
)


@dataclass(frozen=True)
class Subject:
    """A model and what it is measured on.

    Attributes:
        name: for the tables.
        twins: the model, for both sides.
        alone: sentences translated one by one.
        saturated: workloads translated at once, by name.
        compared: sentences compared in float32.
        profiled: sentences of the breakdown under load.
    """

    name: str
    twins: TwinModels
    alone: Workload
    saturated: dict[str, Workload]
    compared: Workload
    profiled: Workload

    @property
    def shortlist_choices(self) -> tuple[bool, ...]:
        """Without a shortlist, and with one if the model has it."""
        return (False, True) if self.twins.checkpoint.shortlist is not None else (False,)


def student_subject(file: Path, testsets: Path, folder: Path, plan: Plan) -> Subject:
    """The trained student on FLORES dev, calibrated on PUD; `folder` is made."""
    calibration = load(testsets, "pud", source="en", target="pt").sources[:_NUM_CALIBRATION_TEXTS]
    folder.mkdir()
    twins = export_student(read_student(file), folder, calibration)
    texts = load(testsets, "flores200-dev", source="en", target="pt").sources[: plan.num_sentences]
    workload = natural(twins.tokenizer.encode_sources(texts), max_target_tokens=MAX_TARGET_TOKENS)
    return Subject(
        name="student",
        twins=twins,
        alone=workload.sample(plan.num_alone),
        saturated={"": workload},
        compared=workload.sample(plan.num_compared),
        profiled=workload.sample(plan.num_profiled),
    )


def base_subject(folder: Path, plan: Plan) -> Subject:
    """The random model of the base size on random sentences; `folder` is made."""
    folder.mkdir()
    sizes = {"vocabulary_size": BASE.vocabulary_size, "eos_id": BASE.eos_id}
    calibration = forced(4, 12, **sizes, seed=_SEED)
    twins = export_twins(
        random_checkpoint(BASE, seed=_SEED),
        folder,
        calibration=calibration.sources,
        verification_texts=["One, two, three.", "Four."],
    )
    same = forced(plan.num_forced, _FORCED_LENGTH, **sizes, seed=_SEED + 1)
    mix = forced_mix(plan.num_mix_blocks, **sizes, seed=_SEED + 2)
    return Subject(
        name="base",
        twins=twins,
        alone=same.sample(plan.num_forced_alone),
        saturated={f"{_FORCED_LENGTH} to {_FORCED_LENGTH}": same, "mixed lengths": mix},
        compared=same.sample(4),
        profiled=same,
    )
