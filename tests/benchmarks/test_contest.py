from __future__ import annotations

import time

import pytest

from benchmarks.contest import Contest, Run, compete, result_of, timed


def contest(ours: list[Run], theirs: list[Run], *, equal_tokens: bool = False, log: list[str] | None = None):
    log = [] if log is None else log
    left, right = iter(ours), iter(theirs)

    def side(name: str, runs):
        def run() -> Run:
            log.append(name)
            return next(runs)

        return run

    return Contest(
        name="a contest",
        ours=side("ours", left),
        theirs=side("theirs", right),
        warm_up=lambda: log.append("warm-up"),
        equal_tokens=equal_tokens,
        their_setting="",
    )


def run(num_tokens: int, wall_s: float, cpu_s: float = 1.0) -> Run:
    return Run(num_tokens, wall_s, cpu_s)


def test_sides_alternate_in_going_first_after_one_warm_up():
    log: list[str] = []
    fought = contest([run(1, 1.0)] * 3, [run(1, 1.0)] * 3, log=log)
    compete([fought], num_rounds=3, progress=lambda _: None)
    assert log == ["warm-up", "ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_the_ratio_is_the_median_of_the_rounds_ratios():
    # A machine ten times slower in one round slows both sides: that round's ratio is like the others'.
    ours = [run(100, 1.0), run(100, 10.0), run(100, 1.0)]
    theirs = [run(100, 2.0), run(100, 20.0), run(100, 3.0)]
    result = result_of(contest(ours, theirs), list(zip(ours, theirs, strict=True)))
    assert result.ratio == 2.0
    assert result.ratio_range == (2.0, 3.0)
    assert result.ours.tokens_per_s == 100.0
    assert result.theirs.wall_s == 3.0


def test_cpu_time_has_a_ratio_of_its_own():
    pair = run(100, 1.0, cpu_s=2.0), run(100, 1.0, cpu_s=1.0)
    result = result_of(contest([], []), [pair])
    assert (result.ratio, result.cpu_ratio) == (1.0, 0.5)


def test_rates_count_each_sides_own_tokens():
    result = result_of(contest([], []), [(run(120, 1.0), run(100, 1.0))])
    assert result.ratio == pytest.approx(1.2)


def test_sides_that_must_make_equal_tokens_and_do_not_are_refused():
    fought = contest([run(99, 1.0)], [run(100, 1.0)], equal_tokens=True)
    with pytest.raises(ValueError, match="99 tokens and the other side 100"):
        compete([fought], num_rounds=1, progress=lambda _: None)


def test_a_timed_run_counts_wall_time_and_cpu_time_of_its_work():
    def work() -> int:
        until_s = time.process_time() + 0.02
        while time.process_time() < until_s:
            pass
        return 5

    found = timed(work)
    assert found.num_tokens == 5
    assert 0.02 <= found.cpu_s <= found.wall_s * 1.5
