from __future__ import annotations

import math

import pytest

from model.training.schedule import Schedule, learning_rate_share

ALL: tuple[Schedule, ...] = ("inverse_sqrt", "linear", "constant")


def share(step: int, schedule: Schedule, *, warmup_steps: int = 100, power: float = 1.0) -> float:
    return learning_rate_share(
        step, schedule=schedule, warmup_steps=warmup_steps, max_steps=1100, power=power
    )


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("inverse_sqrt", 1, 0.01),
        ("inverse_sqrt", 50, 0.5),
        ("inverse_sqrt", 400, 0.5),
        ("inverse_sqrt", 10_000, 0.1),
        ("linear", 25, 0.25),
        ("linear", 350, 0.75),
        ("linear", 600, 0.5),
        ("linear", 1100, 0.0),
        ("linear", 1200, 0.0),
        ("constant", 99, 0.99),
        ("constant", 5000, 1.0),
    ],
)
def test_the_rate_at_points_computed_by_hand(schedule: Schedule, step: int, expected: float) -> None:
    assert share(step, schedule) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ALL)
def test_the_peak_is_reached_at_the_end_of_the_warm_up_without_a_jump(schedule: Schedule) -> None:
    assert share(100, schedule) == 1.0
    assert share(99, schedule) == pytest.approx(1.0, abs=0.02)
    assert share(101, schedule) == pytest.approx(1.0, abs=0.02)


def test_the_inverse_square_root_is_the_papers_with_its_peak_as_unit() -> None:
    """Vaswani et al. 2017, equation 3."""
    d_model, warmup = 512, 4000

    def papers(step: int) -> float:
        return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)

    for step in (1, 100, 3999, 4000, 4001, 100_000):
        mine = share(step, "inverse_sqrt", warmup_steps=warmup)
        assert mine == pytest.approx(papers(step) / papers(warmup))


def test_a_power_bends_the_linear_schedule() -> None:
    assert share(600, "linear", power=3.0) == pytest.approx(0.5**3)


@pytest.mark.parametrize("schedule", ALL)
def test_without_a_warm_up_the_first_step_has_a_rate(schedule: Schedule) -> None:
    assert 0.99 < share(1, schedule, warmup_steps=0) <= 1.0


@pytest.mark.parametrize("schedule", ALL)
def test_a_warm_up_longer_than_the_run_only_rises(schedule: Schedule) -> None:
    shares = [share(step, schedule, warmup_steps=2000) for step in range(1, 1101)]
    assert shares == sorted(shares)
    assert math.isclose(shares[-1], 0.55)
