from __future__ import annotations

from benchmarks.breakdown import Breakdown, GraphTime
from benchmarks.contest import Contest, Run, result_of
from benchmarks.gemm_peak import GemmRate, GemmRates
from benchmarks.peak_share import PeakShare
from benchmarks.report import breakdown_tables, contest_table, gemm_table, peak_table


def never_run() -> Run:
    raise AssertionError("a report runs nothing")


GREEDY = Contest("greedy", never_run, never_run, lambda: None, equal_tokens=False, their_setting="")


def test_a_contest_is_a_line_with_both_sides_and_their_ratios():
    runs = [(Run(100, 1.0, 2.0), Run(100, 2.0, 2.0))]
    *_, line = contest_table([result_of(GREEDY, runs)]).splitlines()
    assert line.split() == [
        "greedy",
        *("100", "50", "2.00", "2.00-2.00"),
        *("50", "50", "1.00"),
        *("1.00", "2.00", "2.00", "2.00"),
    ]


def test_columns_stand_under_their_headings():
    _, headings, line = contest_table([result_of(GREEDY, [(Run(7, 1, 1), Run(7, 1, 1))])]).splitlines()
    assert len(headings) == len(line)


def test_a_shape_has_a_row_and_a_row_count_a_column():
    rates = GemmRates(tuple(GemmRate("uint8", rows, 4, 8, float(rows)) for rows in (32, 1)))
    heading, line = gemm_table(rates).splitlines()
    assert heading.split()[-4:] == ["1", "rows", "32", "rows"]
    assert line.split()[-2:] == ["1.0", "32.0"]


def test_shares_are_of_the_products_and_of_the_peak():
    share = PeakShare("alone", "step", mean_rows=5.0, achieved=20.0, attainable=40.0, peak=100.0)
    assert peak_table([share]).splitlines()[-1].split()[-6:] == ["5.0", "20.0", "40.0", "50%", "100.0", "20%"]


def test_a_breakdown_names_the_largest_operators_and_sums_the_rest():
    operators = {f"Op{index}": 1.0 for index in range(10)} | {"MatMul": 10.0, "Last": 0.5}
    graph = GraphTime("step", num_calls=10, seconds=20.5, by_operator_s=operators)
    text = breakdown_tables([Breakdown("alone", 7, wall_s=41.0, outside_share=0.5, graphs=(graph,))])
    assert "50% outside of graph calls" in text
    assert "MatMul 49%" in text
    assert "all others 7%" in text


def test_a_breakdown_without_operators_says_no_more_than_the_graphs_times():
    graph = GraphTime("step", num_calls=10, seconds=1.0, by_operator_s={})
    text = breakdown_tables([Breakdown("busy", 7, wall_s=2.0, outside_share=0.5, graphs=(graph,))])
    assert text.splitlines()[-1].strip() == "step: 1.00 s, 10 calls, 100.00 ms each"
