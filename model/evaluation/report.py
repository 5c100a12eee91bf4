"""An evaluation as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from model.evaluation.evaluation import Outcome, TestSetOutcome
from model.evaluation.significance import Certainty, Comparison
from model.evaluation.system import Languages

_FEW_LINES = 100
_MAX_WIDTH = 10_000
_SCORES = ("BLEU", "p", "chrF", "p ")
_REST = ("length", "empty", "repeated", "copied", "tokens/s", "lines/s")
_ALL = (*_SCORES, *_REST)
_UNKNOWN = "-"


def print_tables(found: Sequence[TestSetOutcome], console: Console) -> None:
    """One table a test set, and what its figures mean.

    A terminal too narrow for it gets the scores and the rest as two tables; nothing is ever cut.
    """
    is_narrow = console.is_terminal and any(_width(_table(part), console) > console.width for part in found)
    for part in found:
        for table in (_table(part, _SCORES), _table(part, _REST)) if is_narrow else (_table(part),):
            _print_whole(table, console)
    console.print(_explanation(found), highlight=False, soft_wrap=True)


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


def _table(part: TestSetOutcome, headings: Sequence[str] = _ALL) -> Table:
    title = f"{part.testset.name}, {len(part.testset.sources)} lines"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    rows = [_cells(outcome, part.comparison) for outcome in part.outcomes]
    shown = [heading for heading in headings if heading in rows[0]]
    table.add_column("system", no_wrap=True)
    for heading in shown:
        # Two columns are called p; a space at the end keeps them apart here and shows nowhere.
        table.add_column(heading.strip(), justify="right", no_wrap=True)
    for outcome, row in zip(part.outcomes, rows, strict=True):
        table.add_row(outcome.system.name, *(row[heading] for heading in shown))
    return table


def _print_whole(table: Table, console: Console) -> None:
    """Print a table in the width it needs: in a file or a pipe no screen is a reason to cut cells."""
    width_before = console.width
    console.width = _width(table, console)
    console.print(table)
    console.width = width_before


def _width(table: Table, console: Console) -> int:
    """The columns of a screen that a table needs."""
    return console.measure(table, options=console.options.update(max_width=_MAX_WIDTH)).maximum


def _cells(outcome: Outcome, comparison: Comparison | None) -> dict[str, str]:
    """Heading -> cell; certainties only where systems are compared."""
    measures, speed, name = outcome.measures, outcome.speed, outcome.system.name
    cells = {
        "BLEU": f"{measures.bleu:.2f}",
        "chrF": f"{measures.chrf:.2f}",
        "length": f"{measures.length_ratio:.3f}",
        "empty": str(len(measures.faults.empty)),
        "repeated": str(len(measures.faults.repeated)),
        "copied": str(len(measures.faults.copied)),
        "tokens/s": _UNKNOWN if speed is None else f"{speed.target_tokens_per_s:,.0f}",
        "lines/s": _UNKNOWN if speed is None else f"{speed.lines_per_s:,.1f}",
    }
    if comparison is not None:
        bleu, chrf = comparison.bleu[name], comparison.chrf[name]
        cells["BLEU"] += f" ± {bleu.confidence:.2f}"
        cells["chrF"] += f" ± {chrf.confidence:.2f}"
        cells["p"], cells["p "] = _p_value(bleu), _p_value(chrf)
    return cells


def _p_value(certainty: Certainty) -> str:
    return _UNKNOWN if certainty.p_value is None else f"{certainty.p_value:.3f}"


def _explanation(found: Sequence[TestSetOutcome]) -> str:
    outcomes = [outcome for part in found for outcome in part.outcomes]
    signatures = sorted(
        {f"BLEU {o.measures.bleu_signature}; chrF {o.measures.chrf_signature}" for o in outcomes}
    )
    lines = [*signatures, "length: tokens of the translations by those of the references"]
    if any(part.comparison is not None for part in found):
        lines.append("±: 95 % confidence interval, by bootstrap")
        lines.append(
            f"p: paired bootstrap against {outcomes[0].system.name}; below 0.05 a difference is hardly chance"
        )
        if few := [part.testset.name for part in found if len(part.testset.sources) < _FEW_LINES]:
            lines.append(f"{', '.join(few)}: fewer than {_FEW_LINES} lines, of which resampling says little")
    lines += [f"tokens/s, lines/s: {what}" for what in sorted({o.speed.what for o in outcomes if o.speed})]
    return "\n".join(lines)
