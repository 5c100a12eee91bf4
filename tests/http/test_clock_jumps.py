"""The wall clock is set back or forth by hours while the service runs."""

import time

import pytest

from app.api.authentication import Caller
from app.api.errors import QuotaExceeded, RateLimited
from app.api.quotas import Counters
from app.keys import Limits

NOON_S = 1_800_014_400.0
"""Noon of a day, UTC: five hours either way are the same day."""


@pytest.mark.parametrize("jump_s", [-5 * 3600, 5 * 3600])
def test_a_jump_of_the_wall_clock_neither_refills_a_rate_nor_makes_it_wait(
    monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    monkeypatch.setattr(time, "time", lambda: NOON_S)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    meter = Counters().meter(Caller("somebody", None, Limits(characters_per_minute=60)))
    meter.take_characters(60)
    monkeypatch.setattr(time, "time", lambda: NOON_S + jump_s)
    with pytest.raises(RateLimited) as refused:
        meter.take_characters(30)
    assert refused.value.retry_after_s == pytest.approx(30, abs=1)
    monkeypatch.setattr(time, "monotonic", lambda: 1031.0)
    meter.take_characters(30)


@pytest.mark.parametrize("jump_s", [-5 * 3600, 5 * 3600])
def test_the_day_of_a_quota_is_the_calendars(monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    monkeypatch.setattr(time, "time", lambda: NOON_S)
    meter = Counters().meter(Caller("somebody", None, Limits(characters_per_day=60)))
    meter.take_characters(60)
    monkeypatch.setattr(time, "time", lambda: NOON_S + jump_s)
    with pytest.raises(QuotaExceeded) as refused:
        meter.take_characters(1)
    assert refused.value.retry_after_s == 12 * 3600 - jump_s
