"""Whoever arrives when, beside whom, how urgently, and whoever gives up or runs out of time: each sentence
gets the answer it gets alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_checkpoint, tiny_options, tiny_shortlist, tiny_texts

from app.bundle.manifest import Variant
from app.decoding.hypothesis import Hypothesis, LengthNormalisation
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.errors import DeadlineExceeded, RequestCancelled
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.request import Priority
from app.text import Tokenizer
from exporters.export import export_bundle

NUM_SOURCES = 18
MAX_TICKS = 20_000
KINDS = (
    DecodingOptions(max_target_tokens=20),
    DecodingOptions(max_target_tokens=3),
    DecodingOptions(beam_size=2, max_target_tokens=14),
    DecodingOptions(beam_size=3, num_hypotheses=3, patience=2.0, max_target_tokens=9),
    DecodingOptions(beam_size=3, length_penalty=0.0, max_target_tokens=14),
    DecodingOptions(
        beam_size=4, num_hypotheses=4, length_penalty=2.0, normalisation=LengthNormalisation.GNMT
    ),
)


@dataclass(frozen=True)
class Visit:
    """One arrival: how many steps after the one before, what it wants, and after how many it gives up.

    `allowed` is the deadline, in steps after the arrival; an odd request is of priority bulk.
    """

    gap: int
    source: int
    kind: int
    patience: int | None = None
    allowed: int | None = None
    request: int = 0


@dataclass(frozen=True)
class House:
    """What the lane is allowed; the first number is the model, in `MODELS`."""

    model: int
    max_rows: int
    max_admission_tokens: int
    min_newcomers: int


@dataclass
class Guest:
    visit: Visit
    entry: Entry
    leaves_at: int | None
    outcomes: list[Outcome] = field(default_factory=list)


MODELS: Sequence[tuple[Variant, bool]] = [
    (variant, use_shortlist) for variant in ("cpu-fp32", "cpu-int8") for use_shortlist in (True, False)
]

visits = st.lists(
    st.builds(
        Visit,
        gap=st.integers(0, 5),
        source=st.integers(0, NUM_SOURCES - 1),
        kind=st.integers(0, len(KINDS) - 1),
        patience=st.none() | st.integers(0, 12),
        allowed=st.none() | st.integers(0, 20),
        request=st.integers(0, 4),
    ),
    min_size=1,
    max_size=14,
)
houses = st.builds(
    House,
    model=st.integers(0, len(MODELS) - 1),
    max_rows=st.integers(1, 9),
    max_admission_tokens=st.integers(1, 200),
    min_newcomers=st.integers(1, 4),
)


class Decoders:
    """A tiny bundle's models, and what each of them says to a sentence alone."""

    def __init__(self, config: Mapping[str, object], folder: Path) -> None:
        checkpoint = tiny_checkpoint(shortlist=True, **config)
        bundle = export_bundle(checkpoint, folder, tiny_options())
        tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=0)
        self.sources = tokenizer.encode_sources(tiny_texts(NUM_SOURCES))
        self._models: list[OnnxModel] = [
            load_model(bundle, variant=variant, use_shortlist=use_shortlist)
            for variant, use_shortlist in MODELS
        ]
        self.alone = functools.cache(self._alone)

    def lane(self, house: House, *, clock: Callable[[], float] = lambda: 0.0) -> Lane:
        return Lane(
            "tiny",
            OnnxRunner(self._models[house.model], max_rows=house.max_rows),
            max_admission_tokens=house.max_admission_tokens,
            min_newcomers=house.min_newcomers,
            observer=SilentObserver(),
            clock=clock,
        )

    def guest(self, model: int, visit: Visit, *, now: int = 0) -> Guest:
        source, options = self.sources[visit.source], KINDS[visit.kind]
        limit = options.target_limit(len(source), default_ratio=2.5, model_limit=24)
        _, use_shortlist = MODELS[model]
        outcomes: list[Outcome] = []
        entry = Entry(
            source,
            make_search(options, eos_id=0, max_target_tokens=limit),
            max_target_tokens=limit,
            submitted_at_s=0.0,
            deliver=outcomes.append,
            candidates=tiny_shortlist().candidates(source) if use_shortlist else None,
            request=visit.request,
            priority=Priority.BULK if visit.request % 2 else Priority.INTERACTIVE,
            deadline_s=None if visit.allowed is None else float(now + visit.allowed),
        )
        return Guest(visit, entry, None if visit.patience is None else now + visit.patience, outcomes)

    def _alone(self, model: int, source: int, kind: int) -> tuple[Hypothesis, ...]:
        lane = self.lane(House(model, max_rows=1, max_admission_tokens=1, min_newcomers=1))
        guest = self.guest(model, Visit(0, source, kind))
        lane.add(guest.entry)
        while lane.has_work:
            lane.tick()
        (outcome,) = guest.outcomes
        assert isinstance(outcome.result, tuple)
        return outcome.result


# Pre-norm: the post-norm ones of this size say one token for ever.
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "attention": {"decoder_cell": "attention", "norm": "pre", "activation": "gelu", "start_id": 5},
    "gated": {"decoder_cell": "gated_attention", "decoder_query_heads": 8, "norm": "pre"},
    "ssru": {"decoder_cell": "ssru", "norm": "pre"},
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def decoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    torch.set_num_threads(1)
    return Decoders(CONFIGS[request.param], tmp_path_factory.mktemp("arrivals") / "tiny")


def receive(decoders: Decoders, house: House, arrivals: Sequence[Visit]) -> list[Guest]:
    """Let everyone arrive, and give up, at their step, a second each; go on until the lane is idle."""
    guests, tick = list[Guest](), 0
    lane = decoders.lane(house, clock=lambda: float(tick))
    expected = [*arrivals]
    next_at = expected[0].gap
    while expected or lane.has_work:
        while expected and next_at == tick:
            guests.append(decoders.guest(house.model, expected.pop(0), now=tick))
            lane.add(guests[-1].entry)
            next_at = tick + expected[0].gap if expected else tick
        for guest in guests:
            if guest.leaves_at == tick:
                guest.entry.cancel()
        lane.tick()
        tick += 1
        assert tick < MAX_TICKS, "the lane never ends"
    return guests


def same_tokens(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> bool:
    return [(one.token_ids, one.finish_reason) for one in found] == [
        (one.token_ids, one.finish_reason) for one in expected
    ]


FULL = [Visit(0, index, index % len(KINDS)) for index in range(14)]
ONE_BY_ONE = [Visit(2, 17 - index, index % 2) for index in range(14)]
HURRIED = [
    Visit(index % 2, index, index % len(KINDS), None, 3 + 2 * index if index % 3 else None, index % 5)
    for index in range(14)
]
GIVING_UP = [Visit(1, index, 0, patience=4 if index % 3 == 0 else None) for index in range(14)]


@settings(max_examples=25, deadline=None)
@given(house=houses, arrivals=visits)
@example(house=House(0, 9, 200, 1), arrivals=FULL)
@example(house=House(2, 9, 200, 1), arrivals=FULL)
@example(house=House(2, 3, 16, 2), arrivals=ONE_BY_ONE)
@example(house=House(1, 5, 64, 1), arrivals=GIVING_UP)
@example(house=House(2, 5, 64, 1), arrivals=GIVING_UP)
@example(house=House(0, 1, 64, 1), arrivals=GIVING_UP)  # most give up while they wait
@example(house=House(0, 9, 200, 1), arrivals=HURRIED)
@example(house=House(2, 2, 30, 1), arrivals=HURRIED)  # most run out of time while they wait
def test_everyone_is_answered_once_and_with_what_they_would_hear_alone(
    decoders: Decoders, house: House, arrivals: Sequence[Visit]
) -> None:
    guests = receive(decoders, house, arrivals)
    assert [guest.visit for guest in guests] == list(arrivals)
    for guest in guests:
        (outcome,) = guest.outcomes
        if isinstance(outcome.result, RequestCancelled):
            assert guest.entry.cancelled
            continue
        if isinstance(outcome.result, DeadlineExceeded):
            assert guest.visit.allowed is not None
            continue
        assert isinstance(outcome.result, tuple)
        expected = decoders.alone(house.model, guest.visit.source, guest.visit.kind)
        assert same_tokens(outcome.result, expected)
        assert [one.score for one in outcome.result] == pytest.approx(
            [one.score for one in expected], abs=1e-5
        )


def test_the_sentences_are_worth_confusing(decoders: Decoders) -> None:
    """Were all answers alike, a mix-up would not show."""
    for model in range(len(MODELS)):
        answers = {
            source: decoders.alone(model, source, kind=0)[0].token_ids for source in range(NUM_SOURCES)
        }
        assert len(set(answers.values())) > NUM_SOURCES // 2
        assert len({len(tokens) for tokens in answers.values()}) > 2
        assert sum(len(set(tokens)) > 2 for tokens in answers.values()) > NUM_SOURCES // 3
