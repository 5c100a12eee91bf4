"""Tiny models on the simulated device, and guests who come and go in a lane."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_models import tiny_checkpoint, tiny_options, tiny_texts

from app.bundle import Bundle
from app.decoding.guidance import Guidance
from app.decoding.hypothesis import Hypothesis
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.runtime.device import Device
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.gpu.model import load_device_model
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.lane import Lane
from app.runtime.onnx_model import load_model
from app.runtime.runner import ModelRunner
from app.text import Tokenizer
from exporters.export import export_bundle

NUM_SOURCES = 9
MAX_TICKS = 20_000
# Pre-norm: the post-norm ones of this size say one token for ever.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "attention": {"decoder_cell": "attention", "norm": "pre", "start_id": 5},
    "gated": {"decoder_cell": "gated_attention", "decoder_query_heads": 8, "norm": "pre"},
    "ssru": {"decoder_cell": "ssru", "norm": "pre"},
}


@dataclass(frozen=True)
class Wish:
    options: DecodingOptions
    guidance: Guidance | None = None


WISHES = (
    Wish(DecodingOptions(max_target_tokens=12)),
    Wish(DecodingOptions(max_target_tokens=3)),
    Wish(DecodingOptions(beam_size=2, max_target_tokens=9)),
    Wish(DecodingOptions(beam_size=4, num_hypotheses=4, patience=2.0, max_target_tokens=7)),
    Wish(DecodingOptions(max_target_tokens=6), Guidance(prefix=(40, 3), keeps_attention=True)),
    Wish(
        DecodingOptions(beam_size=2, num_hypotheses=2, max_target_tokens=9),
        Guidance(no_repeat_ngram_size=1, min_target_tokens=5, keeps_attention=True),
    ),
)


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

    def answer(self) -> tuple[Hypothesis, ...]:
        (outcome,) = self.outcomes
        assert isinstance(outcome.result, tuple), outcome.result
        return outcome.result


class Decoders:
    """A tiny bundle's models, and what the simulated device says to a sentence alone."""

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        options = tiny_options(variants=("cpu-fp32", "cuda-fp16"))
        self.bundle: Bundle = export_bundle(
            tiny_checkpoint(**config), folder, dataclasses.replace(options, verification_texts=tiny_texts(2))
        )
        tokenizer = Tokenizer.open(self.bundle.file(self.bundle.manifest.tokenizer), eos_id=0)
        self.sources = tokenizer.encode_sources(tiny_texts(NUM_SOURCES))
        self.fp32 = load_model(self.bundle, variant="cpu-fp32", use_shortlist=False)
        self.device = load_device_model(self.bundle, variant="cuda-fp16", device=Device())
        self.alone = functools.cache(self._alone)

    def guest(self, visit: Visit, *, now: int = 0) -> Guest:
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
        )
        return Guest(visit, entry, None if visit.patience is None else now + visit.patience, outcomes)

    def _alone(self, source: int, wish: int) -> tuple[Hypothesis, ...]:
        lane = make_lane(DeviceRunner(self.device, max_rows=1))
        (guest,) = receive(self, lane, [Visit(0, source, wish)])
        return guest.answer()


def make_lane(runner: ModelRunner) -> Lane:
    return Lane("tiny", runner, max_admission_tokens=200, observer=SilentObserver())


def receive(decoders: Decoders, lane: Lane, arrivals: Sequence[Visit]) -> list[Guest]:
    """Let everyone arrive, and give up, at their step; go on until the lane is idle."""
    guests, tick = list[Guest](), 0
    expected = [*arrivals]
    next_at = expected[0].gap
    while expected or lane.has_work:
        while expected and next_at == tick:
            guests.append(decoders.guest(expected.pop(0), now=tick))
            lane.add(guests[-1].entry)
            next_at = tick + expected[0].gap if expected else tick
        for guest in guests:
            if guest.leaves_at == tick:
                guest.entry.cancel()
        lane.tick()
        tick += 1
        assert tick < MAX_TICKS, "the lane never ends"
    return guests


def exactly(hypotheses: Sequence[Hypothesis]) -> list[tuple[object, ...]]:
    """All there is of some hypotheses, to be compared bit by bit."""
    return [
        (
            one.token_ids,
            one.sum_log_probs,
            one.score,
            one.finish_reason,
            None if one.attention is None else one.attention.tobytes(),
        )
        for one in hypotheses
    ]
