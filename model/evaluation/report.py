"""An evaluation as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from model.evaluation.evaluation import Outcome, TestSetOutcome
from model.evaluation.significance import Certainty, Comparison
from model.evaluation.system import Languages

_PLAIN_WIDTH = 10_000
_UNKNOWN = "-"


def print_tables(found: Sequence[TestSetOutcome], console: Console) -> None:
    """One table a test set, and what its figures mean."""
    tables = [_table(part) for part in found]
    if not console.is_terminal:
        # In a file or a pipe nobody's screen is a reason to fold cells.
        console.width = _PLAIN_WIDTH
    for table in tables:
        console.print(table)
    console.print(_explanation(found), highlight=False)


def as_json(found: Sequence[TestSetOutcome], *, languages: Languages | None, num_samples: int) -> object:
    """Everything but the translations."""
    return {
        "source": None if languages is None else languages.source,
        "target": None if languages is None else languages.target,
        "num_samples": num_samples,
        "test_sets": [
            {
                "name": part.testset.name,
                "num_lines": len(part.testset.sources),
                "bootstrap_signatures": None
                if part.comparison is None
                else {"bleu": part.comparison.bleu_signature, "chrf": part.comparison.chrf_signature},
                "systems": [_outcome_facts(outcome, part.comparison) for outcome in part.outcomes],
            }
            for part in found
        ],
    }


def _outcome_facts(outcome: Outcome, comparison: Comparison | None) -> dict[str, object]:
    measures, speed = outcome.measures, outcome.speed
    name = outcome.system.name
    return {
        "name": name,
        **outcome.system.facts,
        "bleu": measures.bleu,
        "bleu_signature": measures.bleu_signature,
        "chrf": measures.chrf,
        "chrf_signature": measures.chrf_signature,
        "length_ratio": measures.length_ratio,
        "empty_lines": list(measures.faults.empty),
        "repeated_lines": list(measures.faults.repeated),
        "copied_lines": list(measures.faults.copied),
        "speed": None
        if speed is None
        else {
            "covers": speed.what,
            "elapsed_s": speed.elapsed_s,
            "num_target_tokens": speed.num_target_tokens,
            "target_tokens_per_s": speed.target_tokens_per_s,
            "lines_per_s": speed.lines_per_s,
        },
        "bootstrap": None
        if comparison is None
        else {
            "bleu": _certainty_facts(comparison.bleu, name),
            "chrf": _certainty_facts(comparison.chrf, name),
        },
    }


def _certainty_facts(certainties: Mapping[str, Certainty], name: str) -> dict[str, float | None]:
    certainty = certainties[name]
    return {
        "mean": certainty.mean,
        "confidence_95": certainty.confidence,
        "p_value": certainty.p_value,
    }


def _table(part: TestSetOutcome) -> Table:
    table = Table(title=f"{part.testset.name}, {len(part.testset.sources)} lines", title_justify="left")
    table.add_column("system", no_wrap=True)
    compared = part.comparison is not None
    score_headings = ["BLEU", "± 95 %", "p"] if compared else ["BLEU"]
    score_headings += ["chrF", "± 95 %", "p"] if compared else ["chrF"]
    for heading in (*score_headings, "length", "empty", "repeated", "copied", "tokens/s", "lines/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in part.outcomes:
        table.add_row(*_cells(outcome, part.comparison))
    return table


def _cells(outcome: Outcome, comparison: Comparison | None) -> list[str]:
    measures, speed, name = outcome.measures, outcome.speed, outcome.system.name
    faults = measures.faults
    return [
        name,
        f"{measures.bleu:.2f}",
        *([] if comparison is None else _certainty_cells(comparison.bleu[name])),
        f"{measures.chrf:.2f}",
        *([] if comparison is None else _certainty_cells(comparison.chrf[name])),
        f"{measures.length_ratio:.3f}",
        str(len(faults.empty)),
        str(len(faults.repeated)),
        str(len(faults.copied)),
        _UNKNOWN if speed is None else f"{speed.target_tokens_per_s:,.0f}",
        _UNKNOWN if speed is None else f"{speed.lines_per_s:,.1f}",
    ]


def _certainty_cells(certainty: Certainty) -> tuple[str, str]:
    p_value = _UNKNOWN if certainty.p_value is None else f"{certainty.p_value:.3f}"
    return f"{certainty.confidence:.2f}", p_value


def _explanation(found: Sequence[TestSetOutcome]) -> str:
    outcomes = [outcome for part in found for outcome in part.outcomes]
    signatures = sorted(
        {f"BLEU {o.measures.bleu_signature}; chrF {o.measures.chrf_signature}" for o in outcomes}
    )
    lines = [*signatures, "length: tokens of the translations by those of the references"]
    if any(part.comparison is not None for part in found):
        lines.append(
            f"p: paired bootstrap against {outcomes[0].system.name}; below 0.05 a difference is hardly chance"
        )
    lines += [f"tokens/s, lines/s: {what}" for what in sorted({o.speed.what for o in outcomes if o.speed})]
    return "\n".join(lines)
