"""A whole house: segments of many requests over a real lane, with the cache, in any order of events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fake_runner import EOS_ID, FakeRunner, translate_alone
from hypothesis import given, settings
from hypothesis import strategies as st

from app.decoding.greedy import GreedySearch
from app.decoding.options import DecodingOptions
from app.errors import DragomanError, RequestCancelled, WorkerFailed
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.flights import Claim, Deliver, Flights
from app.runtime.guidance_of_request import TargetPlan
from app.runtime.lane import Lane
from app.runtime.translation_cache import TranslationCache

MODEL = "m"
TIMEOUT = Outcome(RequestCancelled("too late"), queue_s=0.0, decode_s=0.0)
SOURCES = [(3, 5, EOS_ID), (7, 1, EOS_ID), (2, EOS_ID), (8, 8, 8, EOS_ID), (4, 4, 1, 6, EOS_ID)]
LIMIT = 7


@dataclass(frozen=True)
class Ask:
    source: int
    urgency: int


@dataclass(frozen=True)
class Leave:
    asker: int


@dataclass(frozen=True)
class Expire:
    """The time of a decoding is up, which its lane says by itself."""

    run: int


@dataclass(frozen=True)
class Turn:
    """A step of the lane, and then the loop gets what it posted, or later."""

    loop_turns: bool


@dataclass(frozen=True)
class Fault:
    """The next graph call fails."""


events = st.lists(
    st.one_of(
        st.builds(Ask, source=st.integers(0, len(SOURCES) - 1), urgency=st.integers(0, 2)),
        st.builds(Leave, asker=st.integers(0, 40)),
        st.builds(Expire, run=st.integers(0, 40)),
        st.builds(Turn, loop_turns=st.booleans()),
        st.builds(Turn, loop_turns=st.just(True)),
        st.builds(Fault),
    ),
    max_size=60,
)


@dataclass(eq=False)
class Guest:
    """Someone who asked; `claim` is None for one who was answered from the cache."""

    source: tuple[int, ...]
    claim: Claim | None = None
    left: bool = False
    expired: bool = False
    outcomes: list[Outcome] = field(default_factory=list)

    def deliver(self, outcome: Outcome) -> None:
        assert not self.left, "whoever left is not answered"
        self.outcomes.append(outcome)


class House:
    """Cache, flights, a lane, and a loop that gets the lane's outcomes by post."""

    def __init__(self, max_bytes: int, max_rows: int) -> None:
        self.cache = TranslationCache(max_bytes)
        self.flights = Flights(self.cache)
        self.runner = FakeRunner(max_rows=max_rows)
        self.lane = Lane(MODEL, self.runner, max_admission_tokens=64, observer=SilentObserver())
        self.post: deque[Callable[[], None]] = deque()
        self.guests: list[Guest] = []
        self.runs: list[tuple[Guest, Entry, Deliver]] = []
        self.num_faults = 0
        self.runner.fail_step = self.runner.fail_admit = self._fail

    def do(self, event: object) -> None:
        if isinstance(event, Ask):
            self._ask(SOURCES[event.source], event.urgency)
        elif isinstance(event, Leave) and self.guests:
            guest = self.guests[event.asker % len(self.guests)]
            if guest.claim is not None:
                guest.claim.give_up()
                guest.left = guest.left or not guest.outcomes
        elif isinstance(event, Expire) and self.runs:
            guest, entry, deliver = self.runs[event.run % len(self.runs)]
            guest.expired = True
            entry.cancel()
            self.post.append(lambda: deliver(TIMEOUT))
        elif isinstance(event, Turn):
            self.lane.tick()
            if event.loop_turns:
                self.turn_loop()
        elif isinstance(event, Fault):
            self.num_faults += 1

    def turn_loop(self) -> None:
        while self.post:
            self.post.popleft()()

    def finish(self) -> None:
        while self.lane.has_work or self.post:
            self.lane.tick()
            self.turn_loop()

    def _ask(self, source: tuple[int, ...], urgency: int) -> None:
        guest = Guest(source)
        self.guests.append(guest)
        key = self.cache.keys(MODEL, DecodingOptions()).key(source, TargetPlan(LIMIT))
        kept = self.cache.find(key, model=MODEL)
        if kept is not None:
            guest.deliver(Outcome(kept, queue_s=0.0, decode_s=0.0))
            return

        def start(deliver: Deliver) -> Callable[[], None]:
            entry = Entry(
                source,
                GreedySearch(eos_id=EOS_ID, max_target_tokens=LIMIT),
                max_target_tokens=LIMIT,
                submitted_at_s=0.0,
                deliver=lambda outcome: self.post.append(lambda: deliver(outcome)),
            )
            self.lane.add(entry)
            self.runs.append((guest, entry, deliver))
            return entry.cancel

        guest.claim = self.flights.ask(
            key, model=MODEL, urgency=(urgency,), start=start, deliver=guest.deliver
        )

    def _fail(self) -> None:
        if self.num_faults:
            self.num_faults -= 1
            raise RuntimeError("a fault of the graph")


@settings(max_examples=250, deadline=None)
@given(max_bytes=st.sampled_from([0, 900, 100_000]), max_rows=st.integers(1, 4), happenings=events)
def test_whatever_happens_each_answer_is_what_the_segment_gets_alone(
    max_bytes: int, max_rows: int, happenings: Sequence[object]
) -> None:
    house = House(max_bytes, max_rows)
    any_fault = any(isinstance(event, Fault) for event in happenings)
    for event in happenings:
        house.do(event)
    house.finish()
    assert house.flights.num_flights == 0
    for guest in house.guests:
        if guest.left:
            continue
        (outcome,) = guest.outcomes
        if isinstance(outcome.result, DragomanError):
            if isinstance(outcome.result, RequestCancelled):
                assert guest.expired, "nobody is told that another one's time was up"
            else:
                assert isinstance(outcome.result, WorkerFailed)
                assert any_fault
        else:
            assert outcome.result == (translate_alone(guest.source, LIMIT),)
    for source in SOURCES:
        key = house.cache.keys(MODEL, DecodingOptions()).key(source, TargetPlan(LIMIT))
        kept = house.cache.find(key, model=MODEL)
        assert kept in (None, (translate_alone(source, LIMIT),))
    assert house.cache.num_bytes <= max_bytes


def test_equal_segments_at_the_same_time_are_decoded_once() -> None:
    house = House(100_000, 4)
    for _ in range(5):
        for source in range(len(SOURCES)):
            house.do(Ask(source, 0))
        house.do(Turn(loop_turns=True))
    house.finish()
    house.do(Ask(0, 2))
    assert sorted(house.runner.seen) == sorted(SOURCES)
    assert all(guest.outcomes for guest in house.guests)


def test_with_the_cache_off_every_segment_is_decoded() -> None:
    house = House(0, 4)
    for _ in range(3):
        house.do(Ask(0, 0))
    house.finish()
    assert house.runner.seen == [SOURCES[0]] * 3
