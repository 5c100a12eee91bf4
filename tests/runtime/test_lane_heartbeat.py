"""How long a lane says that an encoder pass may take before its worker counts as hanging."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fake_runner import FakeRunner, make_waiter

from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.runner import SourceRow


class Driven:
    """A lane over groups of 8 and 16 tokens whose passes take what they are told."""

    def __init__(self, first_pass_s: float = 20.0) -> None:
        self.s_per_token = 0.001
        self.extra_s = 0.0
        self.now_s = 0.0
        self.beats: list[float] = []
        self.failing = False
        driven = self

        class Timed(FakeRunner):
            def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
                num_tokens = self.groups[group].source_length * len(newcomers)
                driven.now_s += driven.extra_s + driven.s_per_token * num_tokens
                if driven.failing:
                    raise RuntimeError("CUDA error 2: out of memory")
                super().admit(group, newcomers)

        self.lane = Lane(
            "tiny",
            Timed(lengths=(8, 16), max_rows=64),
            max_admission_tokens=10_000,
            first_pass_s=first_pass_s,
            observer=SilentObserver(),
            clock=lambda: self.now_s,
        )

    def admit(self, count: int, *, num_tokens: int = 2) -> float:
        """Admit so many segments together; returns what was granted."""
        for _ in range(count):
            self.lane.add(make_waiter([9] * num_tokens).entry)
        self.beats.clear()
        self.lane.tick(self.beats.append)
        granted_s, behind_s = self.beats
        assert behind_s == 0.0
        while self.lane.has_work:
            self.lane.tick()
        return granted_s


def test_a_pass_is_granted_the_time_that_its_size_takes() -> None:
    driven = Driven()
    driven.admit(1)
    driven.admit(1)
    assert driven.admit(50) == pytest.approx(0.4)


def test_the_first_pass_of_a_group_is_granted_much_and_teaches_nothing() -> None:
    driven = Driven()
    driven.extra_s = 3.0
    assert driven.admit(1) == 20.0
    driven.extra_s = 0.0
    assert driven.admit(1) == 20.0  # nobody knows yet what a pass takes
    driven.extra_s = 3.0
    assert driven.admit(1, num_tokens=12) == 20.0
    assert driven.admit(50) == pytest.approx(0.4)


def test_a_group_whose_first_pass_failed_begins_again() -> None:
    driven = Driven()
    driven.admit(1)
    driven.admit(1)
    driven.failing = True
    driven.admit(1, num_tokens=12)
    driven.failing = False
    assert driven.admit(1, num_tokens=12) == 20.0
    assert driven.admit(1, num_tokens=12) == pytest.approx(0.016)


def test_whatever_a_slow_pass_taught_the_next_is_granted_a_minute_at_most() -> None:
    driven = Driven()
    driven.admit(1)
    driven.s_per_token = 1.0  # it waited for something else
    driven.admit(1)
    assert driven.admit(50) == 60.0


def test_a_runner_that_makes_nothing_ready_is_granted_nothing_unknown_and_teaches_at_once() -> None:
    driven = Driven(first_pass_s=0.0)
    assert driven.admit(1) == 0.0
    assert driven.admit(50) == pytest.approx(0.4)
    assert driven.admit(1, num_tokens=12) == pytest.approx(0.016)
