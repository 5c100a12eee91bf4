"""Guided, beam and greedy requests in one lane: each gets what it gets alone, attention included."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_checkpoint, tiny_options, tiny_shortlist, tiny_texts

from app.bundle.manifest import Variant
from app.decoding.guidance import Guidance
from app.decoding.hypothesis import FinishReason, Hypothesis
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.errors import RequestCancelled, WorkerFailed
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.runner import BeamStepInput, BeamStepOutput
from app.runtime.worker import Worker
from app.text import Tokenizer
from exporters.export import export_bundle

NUM_SOURCES = 9
MAX_TICKS = 20_000


@dataclass(frozen=True)
class Wish:
    options: DecodingOptions
    guidance: Guidance | None = None


LOOKING = Guidance(keeps_attention=True)
WISHES = (
    Wish(DecodingOptions(max_target_tokens=12)),
    Wish(DecodingOptions(beam_size=2, max_target_tokens=9)),
    Wish(DecodingOptions(max_target_tokens=9), Guidance(prefix=(40, 3), keeps_attention=True)),
    Wish(DecodingOptions(beam_size=2, max_target_tokens=4), LOOKING),
    Wish(
        DecodingOptions(beam_size=2, num_hypotheses=2, max_target_tokens=12),
        Guidance(no_repeat_ngram_size=1, min_target_tokens=7, keeps_attention=True),
    ),
    Wish(
        DecodingOptions(beam_size=2, length_penalty=0.0, max_target_tokens=9),
        Guidance(forbidden=((3,), (5,), (7, 8)), repetition_penalty=1.8, prefix=(60,)),
    ),
    Wish(
        DecodingOptions(beam_size=4, num_hypotheses=4, patience=2.0, max_target_tokens=9),
        Guidance(no_repeat_ngram_size=2, keeps_attention=True),
    ),
)
GUIDED_PAIRS = tuple(
    index for index, wish in enumerate(WISHES) if wish.guidance and wish.options.beam_size == 2
)
MODELS: Sequence[tuple[Variant, bool]] = [
    (variant, use_shortlist) for variant in ("cpu-fp32", "cpu-int8") for use_shortlist in (True, False)
]


@dataclass(frozen=True)
class Visit:
    """One arrival: how many steps after the one before, what it wants, and after how many it gives up."""

    gap: int
    source: int
    wish: int
    patience: int | None = None


@dataclass
class Guest:
    visit: Visit
    entry: Entry
    leaves_at: int | None
    outcomes: list[Outcome] = field(default_factory=list)


class Decoders:
    """A tiny bundle's models, and what each of them says to a sentence alone."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        options = dataclasses.replace(tiny_options(), verification_texts=tiny_texts(2))
        bundle = export_bundle(tiny_checkpoint(shortlist=True, **config), folder, options)
        tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=0)
        self.sources = tokenizer.encode_sources(tiny_texts(NUM_SOURCES))
        self.models: list[OnnxModel] = [
            load_model(bundle, variant=variant, use_shortlist=use_shortlist)
            for variant, use_shortlist in MODELS
        ]
        self.alone = functools.cache(self._alone)

    def guest(self, model: int, visit: Visit, *, now: int = 0) -> Guest:
        source, wish = self.sources[visit.source], WISHES[visit.wish]
        limit = wish.options.max_target_tokens
        assert limit is not None
        outcomes: list[Outcome] = []
        entry = Entry(
            source,
            make_search(wish.options, eos_id=0, max_target_tokens=limit, guidance=wish.guidance),
            max_target_tokens=limit,
            submitted_at_s=0.0,
            deliver=outcomes.append,
            candidates=tiny_shortlist().candidates(source) if MODELS[model][1] else None,
        )
        return Guest(visit, entry, None if visit.patience is None else now + visit.patience, outcomes)

    def _alone(self, model: int, source: int, wish: int) -> tuple[Hypothesis, ...]:
        lane = make_lane(OnnxRunner(self.models[model], max_rows=1))
        (guest,) = receive(self, lane, model, [Visit(0, source, wish)])
        return answer_of(guest)


@pytest.fixture(scope="module", params=["attention", "ssru"])
def decoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    torch.set_num_threads(1)
    # Pre-norm: the post-norm ones of this size say one token for ever.
    config = {"decoder_cell": request.param, "norm": "pre"}
    return Decoders(config, tmp_path_factory.mktemp("guided") / "tiny")


def make_lane(runner: OnnxRunner, *, max_admission_tokens: int = 200) -> Lane:
    return Lane("tiny", runner, max_admission_tokens=max_admission_tokens, observer=SilentObserver())


def answer_of(guest: Guest) -> tuple[Hypothesis, ...]:
    (outcome,) = guest.outcomes
    assert isinstance(outcome.result, tuple), outcome.result
    return outcome.result


def receive(decoders: Decoders, lane: Lane, model: int, arrivals: Sequence[Visit]) -> list[Guest]:
    """Let everyone arrive, and give up, at their step; go on until the lane is idle."""
    guests, tick = list[Guest](), 0
    expected = [*arrivals]
    next_at = expected[0].gap
    while expected or lane.has_work:
        while expected and next_at == tick:
            guests.append(decoders.guest(model, expected.pop(0), now=tick))
            lane.add(guests[-1].entry)
            next_at = tick + expected[0].gap if expected else tick
        for guest in guests:
            if guest.leaves_at == tick:
                guest.entry.cancel()
        lane.tick()
        tick += 1
        assert tick < MAX_TICKS, "the lane never ends"
    return guests


def check_same(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> None:
    assert [(one.token_ids, one.finish_reason) for one in found] == [
        (one.token_ids, one.finish_reason) for one in expected
    ]
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-4)
    for one, other in zip(found, expected, strict=True):
        assert (one.attention is None) == (other.attention is None)
        if one.attention is not None and other.attention is not None:
            assert one.attention.shape == other.attention.shape
            assert np.abs(one.attention - other.attention).max() < 1e-4


visits = st.lists(
    st.builds(
        Visit,
        gap=st.integers(0, 4),
        source=st.integers(0, NUM_SOURCES - 1),
        wish=st.integers(0, len(WISHES) - 1),
        patience=st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=10,
)
FULL = [Visit(0, index % NUM_SOURCES, index % len(WISHES)) for index in range(14)]
PAIRS = [Visit(index % 2, (7 * index) % NUM_SOURCES, GUIDED_PAIRS[index % 3]) for index in range(15)]
GIVING_UP = [dataclasses.replace(visit, patience=4 if visit.source % 3 == 0 else None) for visit in PAIRS]


@settings(max_examples=6, deadline=None)
@given(
    model=st.integers(0, len(MODELS) - 1),
    max_rows=st.integers(1, 12),
    max_admission_tokens=st.integers(1, 200),
    arrivals=visits,
)
@example(model=0, max_rows=12, max_admission_tokens=200, arrivals=FULL)
@example(model=2, max_rows=12, max_admission_tokens=200, arrivals=FULL)
@example(model=0, max_rows=12, max_admission_tokens=30, arrivals=GIVING_UP)
@example(model=3, max_rows=12, max_admission_tokens=200, arrivals=GIVING_UP)
def test_guided_beam_and_greedy_requests_get_together_what_each_gets_alone(
    decoders: Decoders, model: int, max_rows: int, max_admission_tokens: int, arrivals: Sequence[Visit]
) -> None:
    runner = OnnxRunner(decoders.models[model], max_rows=max_rows)
    lane = make_lane(runner, max_admission_tokens=max_admission_tokens)
    guests = receive(decoders, lane, model, arrivals)
    assert [guest.visit for guest in guests] == list(arrivals)
    for guest in guests:
        if isinstance(guest.outcomes[0].result, RequestCancelled):
            assert len(guest.outcomes) == 1
            assert guest.entry.cancelled
            continue
        check_same(answer_of(guest), decoders.alone(model, guest.visit.source, guest.visit.wish))


def test_the_answers_are_worth_confusing(decoders: Decoders) -> None:
    """Were all answers alike, or all as without guidance, a mix-up would not show."""
    for model in (0, 3):
        for wish in GUIDED_PAIRS:
            answers = [decoders.alone(model, source, wish)[0] for source in range(NUM_SOURCES)]
            assert len({answer.token_ids for answer in answers}) > NUM_SOURCES // 2
        for source in range(NUM_SOURCES):
            by_wish = {decoders.alone(model, source, wish)[0].token_ids for wish in range(len(WISHES))}
            assert len(by_wish) > 2


class Counting(OnnxRunner):
    """Notes the moves between slots and the largest number of adjustments of a step."""

    def __init__(self, model: OnnxModel, *, max_rows: int) -> None:
        super().__init__(model, max_rows=max_rows)
        self.moves: list[tuple[int, int]] = []
        self.num_adjustments: list[int] = []

    def move(self, group: int, *, from_slot: int, to_slot: int) -> None:
        self.moves.append((from_slot, to_slot))
        super().move(group, from_slot=from_slot, to_slot=to_slot)

    def beam_step(self, group: int, beams: BeamStepInput) -> BeamStepOutput:
        if beams.adjustments is not None:
            rows, token_ids = beams.adjustments.rows, beams.adjustments.token_ids
            assert len(set(zip(rows.tolist(), token_ids.tolist(), strict=True))) == len(rows)
            self.num_adjustments.append(len(rows))
        return super().beam_step(group, beams)


@pytest.mark.parametrize("model", range(len(MODELS)))
def test_rows_that_move_keep_their_state_their_rules_and_their_attention(
    decoders: Decoders, model: int
) -> None:
    """Three lengths of stay in one group of two beams: whoever leaves is replaced by the last."""
    runner = Counting(decoders.models[model], max_rows=12)
    short, *longer = GUIDED_PAIRS
    sources = [source for source, ids in enumerate(decoders.sources) if len(ids) <= 16][:6]
    arrivals = [
        Visit(0, source, short if at % 2 else longer[at % 4 // 2]) for at, source in enumerate(sources)
    ]
    guests = receive(decoders, make_lane(runner), model, [*arrivals, *arrivals])
    assert len(runner.moves) > 2
    assert 0 in runner.num_adjustments or min(runner.num_adjustments) < max(runner.num_adjustments)
    for guest in guests:
        check_same(answer_of(guest), decoders.alone(model, guest.visit.source, guest.visit.wish))


def test_one_who_may_say_nothing_more_leaves_with_what_there_is_and_the_others_go_on(
    decoders: Decoders,
) -> None:
    """Over the whole vocabulary; the unknown piece, which is never chosen, is forbidden too."""
    model = MODELS.index(("cpu-fp32", False))
    stuck: list[Outcome] = []
    lane = make_lane(OnnxRunner(decoders.models[model], max_rows=12))
    everything = tuple((token_id,) for token_id in range(1, 96))
    guidance = Guidance(min_target_tokens=9, prefix=(40, 3), forbidden=everything, keeps_attention=True)
    lane.add(
        Entry(
            decoders.sources[0],
            make_search(DecodingOptions(beam_size=2), eos_id=0, max_target_tokens=8, guidance=guidance),
            max_target_tokens=8,
            submitted_at_s=0.0,
            deliver=stuck.append,
        )
    )
    guests = receive(decoders, lane, model, PAIRS)
    (outcome,) = stuck
    assert isinstance(outcome.result, tuple)
    (found,) = outcome.result
    assert (found.token_ids, found.finish_reason) == ((40, 3), FinishReason.FORBIDDEN)
    assert found.attention is not None
    assert len(found.attention) == 2
    for guest in guests:
        check_same(answer_of(guest), decoders.alone(model, guest.visit.source, guest.visit.wish))


def test_a_model_without_guided_graph_refuses_guided_searches_and_serves_the_others(
    decoders: Decoders,
) -> None:
    model = dataclasses.replace(decoders.models[0], guided_step=None)
    lane = make_lane(OnnxRunner(model, max_rows=4))
    for wish in (2, 4):
        refused = decoders.guest(0, Visit(0, 0, wish))
        with pytest.raises(ValueError, match="guided search"):
            lane.add(refused.entry)
        assert not lane.has_work
        refused.entry.cancel()  # later, as its client goes
        lane.tick()
        assert refused.outcomes == []
    guests = receive(decoders, lane, 0, [Visit(0, source, source % 2) for source in range(6)])
    for guest in guests:
        check_same(answer_of(guest), decoders.alone(0, guest.visit.source, guest.visit.wish))


def test_a_worker_answers_the_guided_search_it_cannot_run(decoders: Decoders) -> None:
    model = dataclasses.replace(decoders.models[0], guided_step=None)
    worker = Worker("decoding", {"tiny": make_lane(OnnxRunner(model, max_rows=4))})
    answered = threading.Event()
    outcomes: list[Outcome] = []

    def deliver(outcome: Outcome) -> None:
        outcomes.append(outcome)
        answered.set()

    wish = WISHES[4]
    entry = Entry(
        decoders.sources[0],
        make_search(wish.options, eos_id=0, max_target_tokens=12, guidance=wish.guidance),
        max_target_tokens=12,
        submitted_at_s=0.0,
        deliver=deliver,
        candidates=tiny_shortlist().candidates(decoders.sources[0]),
    )
    worker.start()
    worker.submit("tiny", entry)
    assert answered.wait(20)
    assert worker.stop(timeout_s=20)
    (outcome,) = outcomes
    assert isinstance(outcome.result, WorkerFailed)
    assert "guided" in outcome.result.message
