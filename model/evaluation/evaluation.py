"""Runs systems over test sets and keeps everything that was found."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from app.bundle.manifest import QualityScore
from app.errors import InvalidOption
from model.evaluation.bundle_system import BundleSystem
from model.evaluation.measures import Measures, Speed, measure
from model.evaluation.ready_system import translations_path
from model.evaluation.significance import Comparison, compare
from model.evaluation.system import System
from model.evaluation.testset import TestSet

_SCORE_DIGITS = 2


@dataclass(frozen=True)
class Outcome:
    """One system on one test set.

    Attributes:
        system: what translated.
        measures: scores and counts.
        speed: None where nobody measured it.
    """

    system: System
    measures: Measures
    speed: Speed | None


@dataclass(frozen=True)
class TestSetOutcome:
    """All systems on one test set.

    Attributes:
        testset: the test set.
        outcomes: in the order of the systems.
        comparison: against the first system; None of a single one.
    """

    __test__ = False

    testset: TestSet
    outcomes: tuple[Outcome, ...]
    comparison: Comparison | None


def evaluate(
    systems: Sequence[System],
    testsets: Sequence[TestSet],
    *,
    num_samples: int,
    outputs: Path | None = None,
    console: Console,
) -> list[TestSetOutcome]:
    """Translate every test set by every system, score and compare.

    Args:
        systems: the first is what the others are compared with.
        testsets: at least one.
        num_samples: of the bootstrap.
        outputs: keep the translations here, as SYSTEM/TEST_SET.txt; made if absent.
        console: for the progress of scoring.

    Raises:
        InvalidOption: two systems or test sets share a name, or a system cannot answer a test set.
        DragomanError: a system failed.
    """
    _check_unique("system", [system.name for system in systems])
    _check_unique("test set", [testset.name for testset in testsets])
    # All that may be wrong shows before the first long translation.
    for system in systems:
        for testset in testsets:
            system.check(testset)
    if outputs is not None:
        outputs.mkdir(parents=True, exist_ok=True)
    return [
        _evaluate_one(systems, testset, num_samples=num_samples, outputs=outputs, console=console)
        for testset in testsets
    ]


def quality_scores(found: Sequence[TestSetOutcome]) -> Mapping[Path, list[QualityScore]]:
    """The scores that bundles may state: bundle's folder -> scores."""
    scores: dict[Path, list[QualityScore]] = {}
    for part in found:
        for outcome in part.outcomes:
            if isinstance(outcome.system, BundleSystem):
                score = _quality_score(part.testset, outcome.system, outcome.measures)
                scores.setdefault(outcome.system.bundle.path, []).append(score)
    return scores


def _quality_score(testset: TestSet, system: BundleSystem, measures: Measures) -> QualityScore:
    return QualityScore(
        test_set=testset.name,
        variant=system.variant,
        shortlist=system.has_shortlist,
        beam_size=system.decoding.beam_size,
        length_penalty=system.decoding.length_penalty,
        num_segments=measures.num_lines,
        bleu=round(measures.bleu, _SCORE_DIGITS),
        bleu_signature=measures.bleu_signature,
        chrf=round(measures.chrf, _SCORE_DIGITS),
        chrf_signature=measures.chrf_signature,
    )


def _evaluate_one(
    systems: Sequence[System],
    testset: TestSet,
    *,
    num_samples: int,
    outputs: Path | None,
    console: Console,
) -> TestSetOutcome:
    translations_of = {}
    outcomes = []
    for system in systems:
        translations = system.translate(testset)
        if outputs is not None:
            _keep(translations_path(outputs / system.name, testset.name), translations.lines)
        translations_of[system.name] = translations.lines
        with console.status(f"scoring {system.name} on {testset.name}"):
            outcomes.append(Outcome(system, measure(testset, translations.lines), translations.speed))
    comparison = None
    if len(systems) > 1:
        with console.status(f"comparing on {num_samples} samples of {testset.name}"):
            comparison = compare(translations_of, testset.references, num_samples=num_samples)
    return TestSetOutcome(testset, tuple(outcomes), comparison)


def _keep(path: Path, lines: Sequence[str]) -> None:
    """Write the lines; whoever interrupts this finds the old file or the new one, no half."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes("".join(f"{line}\n" for line in lines).encode())
    os.replace(partial, path)


def _check_unique(what: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidOption(f"there are two {what}s {name}; give each a NAME= of its own")
