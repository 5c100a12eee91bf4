"""The segments of one request on their way to the workers and back, on the event loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.errors import DragomanError
from app.runtime.crew import Crew, Seat
from app.runtime.editions import Edition
from app.runtime.entry import Entry, Outcome
from app.runtime.flights import Flights
from app.runtime.guidance_of_request import TargetPlan
from app.runtime.preparation import PreparedSegment
from app.runtime.request import Priority
from app.runtime.served_model import ServedModel

_ENTRIES_PER_TURN = 128
"""Segments queued before other requests get the loop."""


@dataclass(frozen=True)
class Terms:
    """What holds for every segment of one request.

    Attributes:
        request: its number; requests take turns.
        options: how to decode.
        priority: whether it goes before or after others.
        deadline_s: monotonic seconds after which none of it may run, or None.
        clock: monotonic seconds.
    """

    request: int
    options: DecodingOptions
    priority: Priority = Priority.INTERACTIVE
    deadline_s: float | None = None
    clock: Callable[[], float] = time.monotonic


async def decode_segments(
    crew: Crew,
    edition: Edition,
    segments: Sequence[PreparedSegment],
    plans: Sequence[TargetPlan],
    *,
    terms: Terms,
    on_finished: Callable[[int], None] | None = None,
    on_found: Callable[[int], None] | None = None,
    seat: Seat | None = None,
    flights: Flights | None = None,
) -> list[Outcome]:
    """Queue every segment and wait for all; the first error cancels the rest and is raised.

    Args:
        crew: who decodes.
        edition: which model, as loaded when; others' translations of the same id are not its own.
        segments: what.
        plans: what each segment's target is held to.
        terms: what holds for all.
        on_finished: told the tokens, source times beams, of each segment that is done.
        on_found: told the tokens of each segment that was translated before.
        seat: whose worker decodes; None takes whoever has the least to do.
        flights: spares what was translated before or is being translated; None decodes everything.

    Raises:
        DragomanError: the first segment's that was not translated.
    """
    if not segments:
        return []
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    outcomes: list[Outcome | None] = [None] * len(segments)
    num_left = len(segments)

    def receive(index: int, outcome: Outcome) -> None:
        nonlocal num_left
        outcomes[index] = outcome
        num_left -= 1
        if isinstance(outcome.result, DragomanError):
            if not done.done():
                done.set_exception(outcome.result)
            return
        if on_finished is not None:
            on_finished(len(segments[index].source_ids) * terms.options.beam_size)
        if not num_left and not done.done():
            done.set_result(None)

    model = edition.model.id
    keys = None if flights is None else flights.cache.keys(edition.name, terms.options)
    give_up: list[Callable[[], None]] = []
    try:
        for index, (segment, plan) in enumerate(zip(segments, plans, strict=True)):
            start = functools.partial(_start, crew, edition, segment, plan, terms, seat)
            deliver = functools.partial(receive, index)
            key = None if keys is None else keys.key(segment.source_ids, plan)
            if flights is None:
                give_up.append(start(deliver))
            elif (kept := flights.cache.find(key, model=model)) is not None:
                outcomes[index] = Outcome(kept, queue_s=0.0, decode_s=0.0)
                num_left -= 1
                if on_found is not None:
                    on_found(len(segment.source_ids) * terms.options.beam_size)
            else:
                urgency = _urgency(terms, index)
                claim = flights.ask(key, model=model, start=start, deliver=deliver, urgency=urgency)
                give_up.append(claim.give_up)
            if index % _ENTRIES_PER_TURN == _ENTRIES_PER_TURN - 1:
                await asyncio.sleep(0)  # thousands of segments must not hold up everyone else
        if num_left or done.done():  # whatever was found needs no waiting, but a failure is raised
            await done
    except BaseException:
        done.cancel()
        for leave in give_up:
            leave()
        raise
    return [outcome for outcome in outcomes if outcome is not None]


def _urgency(terms: Terms, index: int) -> tuple[int, int]:
    """For `Flights.ask`: requests take turns, so a segment waits by its place among those of its request.

    Whoever joins waits at most twice as many turns as alone, plus one.
    """
    return int(terms.priority is Priority.INTERACTIVE), -index.bit_length()


def _start(
    crew: Crew,
    edition: Edition,
    segment: PreparedSegment,
    plan: TargetPlan,
    terms: Terms,
    seat: Seat | None,
    deliver: Callable[[Outcome], None],
) -> Callable[[], None]:
    """Queue a segment; returns what cancels it."""
    entry = functools.partial(make_entry, edition.model, segment, plan, terms)
    return crew.submit(edition.name, entry, deliver, seat=seat).cancel


def make_entry(
    model: ServedModel,
    segment: PreparedSegment,
    plan: TargetPlan,
    terms: Terms,
    deliver: Callable[[Outcome], None],
) -> Entry:
    """A segment to be decoded, and whom to tell."""
    search = make_search(
        terms.options,
        eos_id=model.eos_id,
        max_target_tokens=plan.max_target_tokens,
        guidance=plan.guidance,
    )
    return Entry(
        segment.source_ids,
        search,
        max_target_tokens=plan.max_target_tokens,
        submitted_at_s=terms.clock(),
        deliver=deliver,
        candidates=segment.candidates,
        request=terms.request,
        priority=terms.priority,
        deadline_s=terms.deadline_s,
    )
