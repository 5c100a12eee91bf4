"""Beam search through exported graphs against the same search over PyTorch's uncached forward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from beam_reference import LogProbs, Prefix, search_beams
from tiny_models import tiny_checkpoint, tiny_options, tiny_texts

from app.bundle.manifest import Variant
from app.decoding.beam import BeamOptions
from app.decoding.hypothesis import Hypothesis
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.decoding.shortlist import Shortlist
from app.errors import DragomanError
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.onnx_runner import OnnxRunner
from app.text import Tokenizer
from exporters.checkpoint import Checkpoint
from exporters.export import export_bundle, without_unknown
from exporters.quantization import quantized
from exporters.torch_reference import to_module

LIMIT = 12
MODELS: dict[str, dict[str, Any]] = {
    "attention": {"decoder_cell": "attention"},
    # Pre-norm: the post-norm one has ties that a last digit decides.
    "gated": {"decoder_cell": "gated_attention", "decoder_query_heads": 8, "norm": "pre"},
    "ssru": {"decoder_cell": "ssru"},
}


@dataclasses.dataclass(frozen=True)
class Exported:
    checkpoint: Checkpoint
    models: dict[tuple[Variant, bool], OnnxModel]
    sources: list[list[int]]

    @property
    def shortlist(self) -> Shortlist:
        assert self.checkpoint.shortlist is not None
        return self.checkpoint.shortlist


@pytest.fixture(scope="module", params=list(MODELS))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.set_num_threads(1)
    checkpoint = tiny_checkpoint(shortlist=True, **MODELS[request.param])
    folder: Path = tmp_path_factory.mktemp("beams") / "tiny"
    bundle = export_bundle(checkpoint, folder, tiny_options())
    tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=0)
    variants: tuple[Variant, ...] = ("cpu-fp32", "cpu-int8")
    return Exported(
        checkpoint=quantized(without_unknown(checkpoint)),
        models={
            (variant, short): load_model(bundle, variant=variant, use_shortlist=short)
            for variant in variants
            for short in (False, True)
        },
        sources=tokenizer.encode_sources(tiny_texts()),
    )


def decode(
    exported: Exported,
    variant: Variant,
    shortlist: bool,
    jobs: Sequence[tuple[int, DecodingOptions]],
    *,
    max_rows: int = 32,
    arrive_at: Sequence[int] = (),
) -> list[tuple[Hypothesis, ...]]:
    """Decode (source, options) pairs in one lane; `arrive_at` delays jobs by that many ticks."""
    lane = Lane(
        "tiny",
        OnnxRunner(exported.models[variant, shortlist], max_rows=max_rows),
        max_admission_tokens=64,
        observer=SilentObserver(),
    )
    outcomes: dict[int, Outcome] = {}

    def add(index: int) -> None:
        source, options = jobs[index]
        ids = exported.sources[source]
        lane.add(
            Entry(
                ids,
                make_search(options, eos_id=0, max_target_tokens=LIMIT),
                max_target_tokens=LIMIT,
                submitted_at_s=0.0,
                deliver=lambda outcome: outcomes.__setitem__(index, outcome),
                candidates=exported.shortlist.candidates(ids) if shortlist else None,
            )
        )

    later = list(arrive_at) + [0] * (len(jobs) - len(arrive_at))
    tick = 0
    while lane.has_work or tick <= max(later, default=0):
        for index, when in enumerate(later):
            if when == tick:
                add(index)
        lane.tick()
        tick += 1
    results = [outcomes[index].result for index in range(len(jobs))]
    assert not [result for result in results if isinstance(result, DragomanError)]
    return results  # type: ignore[return-value]


def torch_log_probs(exported: Exported, source: int, shortlist: bool) -> LogProbs:
    module = to_module(exported.checkpoint)
    ids = exported.sources[source]
    source_ids = torch.tensor([ids])
    mask = torch.ones_like(source_ids, dtype=torch.bool)
    allowed = exported.shortlist.candidates(ids).tolist() if shortlist else slice(None)

    @torch.no_grad()
    def log_probs(prefix: Prefix) -> npt.NDArray[np.float32]:
        logits = module(source_ids, mask, torch.tensor([[*prefix, 0]]))[0, len(prefix)]
        limited = torch.full_like(logits, -1e9)
        limited[allowed] = logits[allowed]
        return np.asarray(limited.log_softmax(0).numpy())

    return log_probs


@pytest.mark.parametrize("shortlist", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        DecodingOptions(beam_size=2),
        DecodingOptions(beam_size=4, num_hypotheses=3, length_penalty=0.6),
        DecodingOptions(beam_size=5, length_penalty=0.0),
        DecodingOptions(beam_size=16, num_hypotheses=16, patience=2.0),
    ],
)
def test_cached_graphs_find_the_beams_that_pytorch_finds_without_cache(
    exported: Exported, shortlist: bool, options: DecodingOptions
) -> None:
    jobs = [(source, options) for source in range(len(exported.sources))]
    found = decode(exported, "cpu-fp32", shortlist, jobs)
    beam_options = BeamOptions(
        beam_size=options.beam_size,
        num_hypotheses=options.num_hypotheses,
        length_penalty=options.length_penalty,
        normalisation=options.normalisation,
        patience=options.patience,
        max_target_tokens=LIMIT,
    )
    for (source, _), ranked in zip(jobs, found, strict=True):
        expected = search_beams(torch_log_probs(exported, source, shortlist), beam_options)
        assert [h.token_ids for h in ranked] == [h.token_ids for h in expected]
        for one, other in zip(ranked, expected, strict=True):
            # A sum over twelve tokens; 1.1e-5 with AVX-512, which adds in another order than AVX2.
            assert one.score == pytest.approx(other.score, abs=1e-4, rel=2e-5)
            assert one.finish_reason is other.finish_reason


@pytest.mark.parametrize("variant", ["cpu-fp32", "cpu-int8"])
def test_greedy_and_beams_of_any_width_run_together_and_each_as_it_would_alone(
    exported: Exported, variant: Variant
) -> None:
    kinds = [
        DecodingOptions(),
        DecodingOptions(beam_size=4, num_hypotheses=2),
        DecodingOptions(beam_size=3, length_penalty=0.0),
        DecodingOptions(beam_size=4, num_hypotheses=4, length_penalty=2.0),
    ]
    jobs = [(source % len(exported.sources), kinds[source % len(kinds)]) for source in range(24)]
    together = decode(exported, variant, True, jobs, max_rows=8, arrive_at=[index % 7 for index in range(24)])
    for job, ranked in zip(jobs, together, strict=True):
        (alone,) = decode(exported, variant, True, [job])
        assert [h.token_ids for h in ranked] == [h.token_ids for h in alone]
        assert [h.score for h in ranked] == pytest.approx([h.score for h in alone], abs=1e-5)
