from __future__ import annotations

import pytest
from echo_engine import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import QueueFull, RequestTooLarge
from app.runtime.admission import Admission, Ticket
from app.runtime.request import Priority

INTERACTIVE, BULK = Priority.INTERACTIVE, Priority.BULK


def measured(clock: Clock, *, tokens_per_s: int = 100, num_seated_tokens: int = 40) -> Admission:
    """A budget of 1,000 tokens that has been seen to finish so many a second."""
    admission = Admission(1000, num_seated_tokens=num_seated_tokens, clock=clock)
    ticket = Ticket(admission, 750)
    for _ in range(7):
        clock.now_s += 100 / tokens_per_s
        ticket.finish(100)
    ticket.close()
    assert admission.tokens_per_s == pytest.approx(tokens_per_s)
    assert admission.num_waiting_tokens == 0
    return admission


def test_who_would_not_be_done_in_time_is_refused_at_once_and_told_when_to_come() -> None:
    admission = measured(Clock())
    Ticket(admission, 500)
    with pytest.raises(QueueFull, match=r"about 9\.6 s.*allows 3 s") as caught:
        Ticket(admission, 500, timeout_s=3.0)
    assert caught.value.retry_after_s == pytest.approx(6.6)
    assert admission.num_waiting_tokens == 500
    Ticket(admission, 500, timeout_s=10.0)


def test_requests_take_turns_so_a_short_one_behind_a_long_one_need_not_wait_for_all_of_it() -> None:
    admission = measured(Clock())
    Ticket(admission, 900)
    assert admission.estimated_wait_s(50, priority=INTERACTIVE) == pytest.approx((50 + 50 - 40) / 100)
    assert admission.estimated_wait_s(1000, priority=INTERACTIVE) == pytest.approx((900 + 1000 - 40) / 100)


def test_interactive_waits_for_an_eighth_of_bulk_at_most_and_bulk_for_all_but_an_eighth() -> None:
    admission = measured(Clock(), num_seated_tokens=0)
    Ticket(admission, 700, priority=BULK)
    assert admission.estimated_wait_s(70, priority=INTERACTIVE) == pytest.approx((70 + 10) / 100)
    Ticket(admission, 300)
    assert admission.estimated_wait_s(10, priority=BULK) == pytest.approx((10 + 10 + 140) / 100)


def test_nobody_is_refused_for_a_rate_that_was_never_measured() -> None:
    clock = Clock()
    admission = Admission(1000, num_seated_tokens=200, clock=clock)
    for _ in range(10):  # one at a time: what a single client asks for, not what can be done
        ticket = Ticket(admission, 10)
        clock.now_s += 1.0
        ticket.finish(10)
        ticket.close()
    assert admission.estimated_wait_s(900, priority=INTERACTIVE) is None
    Ticket(admission, 900, timeout_s=0.1)


def test_what_finds_free_rows_does_not_wait() -> None:
    admission = measured(Clock())
    assert admission.estimated_wait_s(40, priority=INTERACTIVE) == 0.0


def test_bulk_leaves_a_quarter_of_the_budget_to_others() -> None:
    admission = Admission(1000, clock=Clock())
    bulk = Ticket(admission, 700, priority=BULK)
    with pytest.raises(QueueFull, match="limit for bulk is 750"):
        Ticket(admission, 51, priority=BULK)
    with pytest.raises(RequestTooLarge, match="at most 750 for bulk"):
        Ticket(admission, 751, priority=BULK)
    others = Ticket(admission, 300)
    with pytest.raises(QueueFull, match="limit is 1000"):
        Ticket(admission, 1)
    bulk.correct(650)
    Ticket(admission, 50)
    others.close()
    others.close()
    assert admission.num_waiting_tokens == 700


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["open", "correct", "finish", "close", "close"]),
            st.integers(0, 5),
            st.integers(0, 400),
            st.sampled_from(Priority),
        ),
        max_size=60,
    )
)
def test_whatever_is_taken_is_given_back_and_no_budget_is_ever_exceeded(
    steps: list[tuple[str, int, int, Priority]],
) -> None:
    clock = Clock()
    admission = Admission(1000, num_seated_tokens=100, clock=clock)
    tickets: list[Ticket] = []
    retry_after_s: list[float] = []
    for action, index, num_tokens, priority in steps:
        clock.now_s += 0.01
        try:
            if action == "open":
                tickets.append(Ticket(admission, num_tokens, priority=priority, timeout_s=index or None))
            elif tickets and action == "correct":
                tickets[index % len(tickets)].correct(num_tokens)
            elif tickets and action == "finish":
                tickets[index % len(tickets)].finish(num_tokens)
            elif tickets:
                tickets.pop(index % len(tickets)).close()
        except QueueFull as error:
            retry_after_s.append(error.retry_after_s)
        assert 0 <= admission.num_waiting_tokens <= 1000
        assert admission.tokens_per_s > 0
    assert all(1.0 <= seconds <= 60.0 for seconds in retry_after_s)
    for ticket in tickets:
        ticket.close()
    assert admission.num_waiting_tokens == 0
    assert admission.estimated_wait_s(100, priority=BULK) in (None, 0.0)
