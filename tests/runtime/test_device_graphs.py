"""Buckets, names of captured graphs, the gate between captures and all else, and when captures are tried."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runtime.gpu.graphs import MAX_CAPTURE_WAIT_S, CaptureGate, Captures, GraphIds, buckets
from app.settings import Settings

PATIENCE_S = 30.0


@given(max_slots=st.integers(1, 5000))
def test_buckets_are_powers_of_two_up_to_all_slots_and_waste_less_than_half(max_slots: int) -> None:
    found = buckets(max_slots)
    assert found[0] == 1
    assert found[-1] == max_slots
    assert list(found) == sorted(set(found))
    assert all(bucket & (bucket - 1) == 0 for bucket in found[:-1])
    assert all(2 * small >= large for small, large in itertools.pairwise(found))


def test_graph_ids_are_neither_of_those_that_mean_something_else() -> None:
    ids = GraphIds()
    taken = [ids.take() for _ in range(5)]
    assert len(set(taken)) == 5
    assert min(taken) > 0


class Visitor:
    """A thread that goes through a gate and stays inside until it is let go."""

    def __init__(self, entrance: Any) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self.granted: list[bool | None] = []

        def visit() -> None:
            with entrance as granted:
                self.granted.append(granted)
                self.inside.set()
                assert self.leave.wait(PATIENCE_S)

        self._thread = threading.Thread(target=visit)
        self._thread.start()

    def end(self) -> None:
        self.leave.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_many_use_a_gpu_together_and_a_capture_waits_for_all_of_them() -> None:
    gate = CaptureGate(max_wait_s=PATIENCE_S)
    users = [Visitor(gate.using()) for _ in range(3)]
    assert all(user.inside.wait(PATIENCE_S) for user in users)
    capture = Visitor(gate.capturing())
    for user in users:
        assert not capture.inside.is_set()
        user.end()
    assert capture.inside.wait(PATIENCE_S)
    latecomers = [Visitor(gate.using()), Visitor(gate.capturing())]
    assert not any(latecomer.inside.wait(0.02) for latecomer in latecomers)
    capture.end()
    assert latecomers[1].inside.wait(PATIENCE_S)  # a capture goes before those who only use
    assert not latecomers[0].inside.is_set()
    latecomers[1].end()
    assert latecomers[0].inside.wait(PATIENCE_S)
    latecomers[0].end()
    assert capture.granted == [True]


def test_a_capture_that_waited_too_long_holds_nothing() -> None:
    gate = CaptureGate(max_wait_s=0.0)
    user = Visitor(gate.using())
    assert user.inside.wait(PATIENCE_S)
    with gate.capturing() as granted:
        assert not granted
        with gate.using():
            pass
    user.end()
    with gate.capturing() as granted:
        assert granted


def test_a_capture_that_raises_opens_the_gate_again() -> None:
    gate = CaptureGate()
    for entrance in (gate.using, gate.capturing):
        with pytest.raises(RuntimeError, match="CUDA"), entrance():
            raise RuntimeError("CUDA error")
    with gate.capturing() as granted:
        assert granted


def has_waiting(gate: CaptureGate, *, captures: int = 0, users: int = 0) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while (gate._num_waiting, len(gate._first_from_s)) != (captures, users):
        if time.monotonic() > deadline_s:
            return False
    return True


def test_a_capture_that_waits_for_long_does_not_keep_users_out_for_as_long() -> None:
    """A worker that is kept out shows no sign of life."""
    gate = CaptureGate(max_wait_s=PATIENCE_S)
    loading = Visitor(gate.using())
    assert loading.inside.wait(PATIENCE_S)
    capture = Visitor(gate.capturing())
    assert has_waiting(gate, captures=1)
    gate._max_wait_s = 0.01
    user = Visitor(gate.using())
    assert user.inside.wait(PATIENCE_S / 3)
    assert not capture.inside.is_set()
    for visitor in (user, loading, capture):
        visitor.end()


def test_users_who_were_kept_out_for_long_go_before_the_next_capture() -> None:
    gate = CaptureGate(max_wait_s=PATIENCE_S)
    first = Visitor(gate.capturing())
    assert first.inside.wait(PATIENCE_S)
    second = Visitor(gate.capturing())
    assert has_waiting(gate, captures=1)  # so that it is woken before the users
    gate._max_wait_s = 0.0
    users = [Visitor(gate.using()) for _ in range(2)]
    assert has_waiting(gate, captures=1, users=2)
    first.end()
    assert all(user.inside.wait(PATIENCE_S / 3) for user in users)
    assert not second.inside.is_set()
    for user in users:
        user.end()
    assert second.inside.wait(PATIENCE_S / 3)
    second.end()
    assert second.granted == [True]


def test_the_wait_for_a_capture_is_far_from_what_counts_as_hanging() -> None:
    assert Settings.model_fields["max_heartbeat_age_s"].default / 10 >= MAX_CAPTURE_WAIT_S


def test_captures_that_are_never_granted_are_tried_a_few_times_at_growing_distances(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s, tried_at_s = 0.0, list[float]()
    gate = CaptureGate(max_wait_s=0.0)
    user = Visitor(gate.using())
    assert user.inside.wait(PATIENCE_S)
    captures = Captures(8, what="8 row slots", clock=lambda: now_s)
    for now_s in range(5000):
        if captures.is_due():
            tried_at_s.append(now_s)
            captures.capture(gate, lambda _num_slots, _graph_id: pytest.fail("nobody allowed that"))
    user.end()
    assert tried_at_s == [0, 2, 10, 42, 170, 682]
    assert captures.slot_counts == ()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "for now" in caplog.records[0].getMessage()
    assert "at 6 tries" in caplog.records[1].getMessage()


def test_only_the_thread_that_captured_has_the_graphs_or_captures_more() -> None:
    captures, gate = Captures(4, what="4 row slots"), CaptureGate()
    captures.capture(gate, lambda _num_slots, _graph_id: None)
    assert list(captures.of_this_thread()) == [4, 2, 1]
    elsewhere: list[object] = []
    thread = threading.Thread(target=lambda: elsewhere.append(captures.of_this_thread()))
    thread.start()
    thread.join()
    assert elsewhere == [{}]
