"""Training curves: what the metrics file says is what is drawn, and what is wrong with it is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from app.errors import InvalidOption
from model.figures.training_curves import Run, draw_curves, panels_of, read_run


def write(path: Path, *rows: object, end: str = "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + end, encoding="utf-8")
    return path


def test_a_run_is_read_from_its_folder_and_named_after_it(tmp_path: Path) -> None:
    file = write(
        tmp_path / "base" / "metrics.jsonl",
        {"step": 1, "time_s": 2.5, "loss": 9.0, "learning_rate": 1e-4},
        {"step": 2, "time_s": 5, "loss": 8, "dev_bleu": 0.5, "note": "text", "done": True, "nothing": None},
    )
    expected = {
        "loss": [(1.0, 2.5, 9.0), (2.0, 5.0, 8.0)],
        "learning_rate": [(1.0, 2.5, 1e-4)],
        "dev_bleu": [(2.0, 5.0, 0.5)],
    }
    assert read_run(file) == read_run(tmp_path / "base") == Run("base", expected)


def test_a_line_that_is_still_being_written_is_left_for_the_next_time(tmp_path: Path) -> None:
    file = write(tmp_path / "metrics.jsonl", {"step": 1, "time_s": 1, "loss": 3.0})
    with file.open("a") as stream:
        stream.write('{"step": 2, "time_')
    assert read_run(file).series == {"loss": [(1.0, 1.0, 3.0)]}


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '"a"',
        '{"step": 1}',
        '{"step": "1", "time_s": 1}',
        '{"step": true, "time_s": 1}',
        "3",
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_metric_is_named(line: str, tmp_path: Path) -> None:
    file = write(tmp_path / "metrics.jsonl", {"step": 1, "time_s": 1, "loss": 3.0})
    with file.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(InvalidOption, match="line 2"):
        read_run(file)


@pytest.mark.parametrize(
    "numbers", ['"loss": 1e308', '"loss": -1e101', '"loss": 1, "step": NaN', '"time_s": Infinity']
)
def test_a_number_that_no_axis_can_show_is_named(numbers: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        f'{{"step": 1, "time_s": 1, "loss": 3.0}}\n{{"step": 2, "time_s": 2, "loss": 3.0, {numbers}}}\n'
    )
    with pytest.raises(InvalidOption, match=r"line 2: (loss|step|time_s) is .* remove the line"):
        read_run(file)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_a_run_that_went_wrong_leaves_is_a_gap(value: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(
            f'{{"step": {step}, "time_s": {step}, "loss": {loss}}}\n'
            for step, loss in enumerate((3, value, 2), start=1)
        )
    )
    run = read_run(file)
    assert [math.isnan(loss) for _, _, loss in run.series["loss"]] == [False, True, False]
    (line,) = draw_curves([run]).axes[0].get_lines()
    assert np.isnan(line.get_ydata()).tolist() == [False, True, False]


def test_a_whole_number_beyond_all_floats_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1, "time_s": 1, "loss": {"9" * 400}}}\n')
    with pytest.raises(InvalidOption, match="line 1"):
        read_run(file)


def test_a_missing_file_and_an_empty_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="cannot be read"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(InvalidOption, match="no numbers"):
        read_run(tmp_path)


def test_losses_share_a_panel_and_an_unknown_number_gets_its_own() -> None:
    points = [(1.0, 1.0, 1.0)]
    run = Run("a", dict.fromkeys(["zeta", "dev_loss", "loss", "dev_bleu"], points))
    assert panels_of([run]) == [
        ("cross-entropy (nats a token)", ("loss", "dev_loss")),
        ("BLEU, development set", ("dev_bleu",)),
        ("zeta", ("zeta",)),
    ]


def test_every_run_is_drawn_in_every_panel_it_has_numbers_for() -> None:
    one = Run("one", {"loss": [(1, 0, 5.0), (2, 3600, 4.0)], "dev_loss": [(2, 3600, 4.5)]})
    two = Run("two", {"loss": [(1, 0, 6.0)], "dev_bleu": [(1, 0, 20.0)]})
    by_step = draw_curves([one, two]).axes
    assert [len(axis.lines) for axis in by_step] == [3, 1]
    assert by_step[0].lines[0].get_xydata().tolist() == [[1, 5], [2, 4]]  # type: ignore[union-attr]
    by_time = draw_curves([one, two], against="time_s").axes
    assert by_time[0].lines[0].get_xydata().tolist() == [[0, 5], [1, 4]]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [r"$\foo$", "a$b", "\ud800", "new\nline", "_^{"])
def test_any_name_can_be_drawn_and_is_shown_as_it_is(name: str, tmp_path: Path) -> None:
    run = Run(name, {name: [(1, 0, 5.0)], "loss": [(1, 0, 5.0)], "dev_loss": [(1, 0, 4.0)]})
    draw_curves([run, Run("other", {"loss": [(1, 0, 5.0)]})]).savefig(tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000


def test_only_the_wanted_metrics_are_drawn_and_an_unknown_one_is_refused() -> None:
    run = Run("a", {"loss": [(1, 0, 5.0)], "dev_loss": [(1, 0, 5.0)], "dev_bleu": [(1, 0, 5.0)]})
    axes = draw_curves([run], metrics=["dev_loss"]).axes
    assert [len(axis.lines) for axis in axes] == [1]
    with pytest.raises(InvalidOption, match="no run has speed"):
        draw_curves([run], metrics=["speed"])
