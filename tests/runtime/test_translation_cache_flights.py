"""Equal segments share a decoding, and nobody's answer suffers from who else asked, left or failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from app.decoding.hypothesis import FinishReason, Hypothesis
from app.errors import RequestCancelled, ShuttingDown, WorkerFailed
from app.runtime.entry import Outcome
from app.runtime.flights import Claim, Deliver, Flights
from app.runtime.translation_cache import CacheLookup, SilentCacheObserver, TranslationCache

MODEL = "m"
KEY = b"key"
ANSWER = Outcome((Hypothesis((1, 2), -1.0, FinishReason.EOS),), queue_s=0.5, decode_s=0.25)
FAILURE = Outcome(WorkerFailed("the graph failed"), queue_s=0.0, decode_s=0.0)
TIMEOUT = Outcome(RequestCancelled("too late"), queue_s=0.0, decode_s=0.0)


class Watcher(SilentCacheObserver):
    def __init__(self) -> None:
        self.results: list[CacheLookup] = []

    def on_cache_lookup(self, model: str, result: CacheLookup) -> None:
        assert model == MODEL
        self.results.append(result)


@dataclass
class Asker:
    """A caller with what it started, what became of that, and what it was answered."""

    flights: Flights
    urgency: int = 0
    key: bytes | None = KEY
    refusal: Exception | None = None
    deliver: Deliver | None = None
    num_begun: int = 0
    num_cancelled: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    claim: Claim | None = None

    def ask(self) -> Asker:
        self.claim = self.flights.ask(
            self.key, model=MODEL, urgency=(self.urgency,), start=self.start, deliver=self.outcomes.append
        )
        return self

    def start(self, deliver: Deliver) -> Callable[[], None]:
        if self.refusal is not None:
            raise self.refusal
        self.num_begun += 1
        self.deliver = deliver
        return self.cancel

    def cancel(self) -> None:
        self.num_cancelled += 1

    def give_up(self) -> None:
        assert self.claim is not None
        self.claim.give_up()

    def land(self, outcome: Outcome) -> None:
        assert self.deliver is not None
        self.deliver(outcome)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def cache(watcher: Watcher) -> TranslationCache:
    return TranslationCache(100_000, observer=watcher)


@pytest.fixture
def flights(cache: TranslationCache) -> Flights:
    return Flights(cache)


def test_one_decoding_answers_all_who_ask_meanwhile_and_is_kept(
    flights: Flights, cache: TranslationCache, watcher: Watcher
) -> None:
    askers = [Asker(flights).ask() for _ in range(3)]
    assert [asker.num_begun for asker in askers] == [1, 0, 0]
    assert [asker.outcomes for asker in askers] == [[], [], []]
    askers[0].land(ANSWER)
    assert [asker.outcomes for asker in askers] == [[ANSWER]] * 3
    assert flights.num_flights == 0
    assert cache.find(KEY, model=MODEL) == ANSWER.result
    assert watcher.results == [CacheLookup.MISS, CacheLookup.JOINED, CacheLookup.JOINED, CacheLookup.HIT]


def test_other_keys_and_no_keys_share_nothing(flights: Flights, cache: TranslationCache) -> None:
    askers = [Asker(flights, key=key).ask() for key in (b"a", b"b", None, None)]
    assert [asker.num_begun for asker in askers] == [1, 1, 1, 1]
    assert flights.num_flights == 2
    for asker in askers:
        asker.land(ANSWER)
    assert [asker.outcomes for asker in askers] == [[ANSWER]] * 4
    assert cache.num_entries == 2


def test_the_decoding_goes_on_when_the_one_who_began_it_leaves(flights: Flights) -> None:
    first, second = Asker(flights).ask(), Asker(flights).ask()
    first.give_up()
    first.give_up()
    assert first.num_cancelled == 0
    first.land(ANSWER)
    assert (first.outcomes, second.outcomes) == ([], [ANSWER])


def test_the_last_one_to_leave_cancels_the_decoding(flights: Flights, cache: TranslationCache) -> None:
    first, second = Asker(flights).ask(), Asker(flights).ask()
    first.give_up()
    second.give_up()
    assert first.num_cancelled == 1
    assert flights.num_flights == 0
    first.land(TIMEOUT)
    third = Asker(flights).ask()
    assert third.num_begun == 1, "a cancelled decoding is not joined"
    first.land(ANSWER)
    assert third.outcomes == []
    assert cache.num_entries == 0


def test_when_the_beginner_runs_out_of_time_the_most_urgent_of_the_others_begins_anew(
    flights: Flights,
) -> None:
    first = Asker(flights, urgency=2).ask()
    low, high, also_high = (Asker(flights, urgency=urgency).ask() for urgency in (0, 1, 1))
    first.land(TIMEOUT)
    assert first.outcomes == [TIMEOUT]
    assert [asker.num_begun for asker in (low, high, also_high)] == [0, 1, 0]
    high.land(ANSWER)
    assert [asker.outcomes for asker in (low, high, also_high)] == [[ANSWER]] * 3


def test_a_beginner_who_left_and_then_runs_out_of_time_is_not_answered(flights: Flights) -> None:
    first, second = Asker(flights).ask(), Asker(flights).ask()
    first.give_up()
    first.land(TIMEOUT)
    assert (first.outcomes, second.num_begun) == ([], 1)
    second.land(ANSWER)
    assert second.outcomes == [ANSWER]


def test_a_failure_answers_all_and_is_not_kept(flights: Flights, cache: TranslationCache) -> None:
    askers = [Asker(flights).ask() for _ in range(3)]
    askers[0].land(FAILURE)
    assert [asker.outcomes for asker in askers] == [[FAILURE]] * 3
    assert [asker.num_begun for asker in askers] == [1, 0, 0], "what fails for one is not tried for each"
    assert cache.num_entries == 0
    assert Asker(flights).ask().num_begun == 1


def test_the_more_urgent_does_not_wait_for_the_less_urgent(flights: Flights, watcher: Watcher) -> None:
    bulk, more_bulk = Asker(flights, urgency=0).ask(), Asker(flights, urgency=0).ask()
    urgent, also_urgent = Asker(flights, urgency=1).ask(), Asker(flights, urgency=1).ask()
    assert [asker.num_begun for asker in (bulk, more_bulk, urgent, also_urgent)] == [1, 0, 1, 0]
    urgent.land(ANSWER)
    assert [asker.outcomes for asker in (bulk, more_bulk, urgent, also_urgent)] == [[ANSWER]] * 4
    assert (bulk.num_cancelled, urgent.num_cancelled) == (1, 0)
    bulk.land(TIMEOUT)
    assert bulk.outcomes == [ANSWER]
    assert watcher.results == [CacheLookup.MISS, CacheLookup.JOINED, CacheLookup.MISS, CacheLookup.JOINED]


def test_while_a_second_decoding_is_under_way_the_failure_of_the_first_is_no_answer(flights: Flights) -> None:
    bulk, urgent = Asker(flights, urgency=0).ask(), Asker(flights, urgency=1).ask()
    urgent.land(FAILURE)
    assert (bulk.outcomes, urgent.outcomes) == ([], [])
    bulk.land(ANSWER)
    assert (bulk.outcomes, urgent.outcomes) == ([ANSWER], [ANSWER])


def test_whoever_cannot_begin_is_told_and_leaves_the_others_alone(flights: Flights) -> None:
    refusal = ShuttingDown("closing")
    with pytest.raises(ShuttingDown):
        Asker(flights, refusal=refusal).ask()
    assert flights.num_flights == 0
    bulk = Asker(flights).ask()
    with pytest.raises(ShuttingDown):
        Asker(flights, urgency=1, refusal=refusal).ask()
    bulk.land(ANSWER)
    assert bulk.outcomes == [ANSWER]


def test_whoever_cannot_begin_anew_is_told_and_the_next_one_tries(flights: Flights) -> None:
    first, refused, third = Asker(flights).ask(), Asker(flights).ask(), Asker(flights).ask()
    refused.refusal = ShuttingDown("closing")
    first.land(TIMEOUT)
    assert [outcome.result for outcome in refused.outcomes] == [refused.refusal]
    third.land(ANSWER)
    assert third.outcomes == [ANSWER]


def test_a_fault_in_beginning_anew_leaves_nobody_waiting(flights: Flights) -> None:
    first, second, third = Asker(flights).ask(), Asker(flights).ask(), Asker(flights).ask()
    second.refusal = MemoryError("no room")
    with pytest.raises(MemoryError):
        first.land(TIMEOUT)
    assert [type(asker.outcomes[0].result) for asker in (second, third)] == [WorkerFailed] * 2
    assert flights.num_flights == 0


def test_leaving_while_answers_are_handed_out_is_leaving(flights: Flights) -> None:
    first, second = Asker(flights), Asker(flights)
    first.claim = flights.ask(KEY, model=MODEL, start=first.start, deliver=lambda outcome: second.give_up())
    second.ask()
    first.land(ANSWER)
    assert second.outcomes == []
