"""An export is exact, or it is refused: the serving decoder against PyTorch, segment by segment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from app.bundle import Bundle, Manifest, Variant
from app.bundle.manifest import Verification
from app.decoding.greedy import GreedySearch
from app.decoding.hypothesis import Hypothesis
from app.decoding.options import DecodingOptions
from app.decoding.shortlist import Shortlist
from app.errors import DragomanError, VerificationFailed
from app.runtime.device import Device
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.gpu.model import load_device_model
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.runner import ModelRunner
from app.text import Tokenizer
from exporters.checkpoint import Checkpoint
from exporters.torch_reference import to_module
from model.greedy import GreedyResult, greedy

MAX_SCORE_DIFFERENCE = 1e-4
"""Largest accepted difference of a segment's score between fp32 graphs and PyTorch."""
MIN_IDENTICAL_SHARE = 0.5
"""Smallest accepted share of segments with PyTorch's tokens in float16. Its roundings turn near ties: a few
segments of a hundred with trained weights. Where half of them differ something else is wrong, such as sums
that leave the range of float16."""
_TORCH_BATCH = 16
_MAX_ROWS = 32


def verify(
    bundle: Bundle,
    checkpoint: Checkpoint,
    texts: Sequence[str],
    *,
    variant: Variant,
    progress: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Translate texts with both sides and compare token by token.

    With a shortlist, both step graphs of a CPU variant are compared: a segment counts as identical when the
    one over the shortlist and the one over the whole vocabulary choose their reference's tokens. The graphs
    for a GPU, which have none, run on the CPU, where float16 is rounded as it is there.

    Args:
        bundle: the exported graphs; its manifest need not be on disk yet.
        checkpoint: the quantised checkpoint they were built from.
        texts: segments in the source language, each within the model's limit.
        variant: which graphs.
        progress: told how many segments PyTorch has translated.

    Raises:
        VerificationFailed: a segment failed, as one with a score that is no number does, or none is short
            enough.
    """
    manifest = bundle.manifest
    tokenizer = Tokenizer.open(bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)
    shortlist = None
    if manifest.shortlist is not None and manifest.variants[variant].shortlist_step is not None:
        shortlist = Shortlist.load(bundle.file(manifest.shortlist))
    sources = [tokenizer.encode_source(text) for text in texts]
    sources = [ids for ids in sources if len(ids) <= manifest.limits.max_source_tokens]
    if not sources:
        raise VerificationFailed("no verification text fits the model's source limit; give some shorter ones")
    limits = [_limit(manifest, ids) for ids in sources]
    num_identical = [0] * len(sources)
    max_difference = 0.0
    vocabularies = [None] if shortlist is None else [shortlist, None]
    for allowed in vocabularies:
        runner = _runner(bundle, variant, use_shortlist=allowed is not None)
        try:
            ours = serve_with(runner, manifest, sources, shortlist=allowed)
        except VerificationFailed as error:
            raise VerificationFailed(
                f"{variant}: {error.message}; no bundle was written. If other variants pass, this model's "
                f"values are too large for this arithmetic: leave {variant} out"
            ) from error
        reference = reference_translations(
            checkpoint,
            sources,
            limits=limits,
            shortlist=allowed,
            progress=lambda done: progress(
                f"verifying {variant}: PyTorch at {done} of {len(sources)} segments"
            ),
        )
        for index, (hypothesis, expected) in enumerate(zip(ours, reference, strict=True)):
            if hypothesis.token_ids != expected.token_ids:
                continue
            num_identical[index] += 1
            score = expected.log_prob / max(1, len(expected.token_ids) + expected.ended)
            max_difference = max(max_difference, abs(hypothesis.score - score))
    return Verification(
        variant=variant,
        num_segments=len(sources),
        num_identical=num_identical.count(len(vocabularies)),
        max_score_difference=max_difference,
    )


def require_equal(report: Verification) -> None:
    """Refuse an fp32 export that differs from PyTorch in a token or in a score.

    Raises:
        VerificationFailed: naming how many segments differ and the limit.
    """
    if report.num_identical != report.num_segments or not report.max_score_difference <= MAX_SCORE_DIFFERENCE:
        raise VerificationFailed(
            f"{report.variant}: {report.num_identical} of {report.num_segments} segments have PyTorch's "
            f"tokens and scores differ by up to {report.max_score_difference:.2e} "
            f"(limit {MAX_SCORE_DIFFERENCE:.0e}); no bundle was written. The graph builder and "
            "model/transformer.py disagree"
        )


def require_similar(report: Verification) -> None:
    """Refuse a float16 export that is not the same model; few other tokens are no fault.

    Raises:
        VerificationFailed: naming how many segments differ and the limit.
    """
    if report.num_identical < MIN_IDENTICAL_SHARE * report.num_segments:
        raise VerificationFailed(
            f"{report.variant}: {report.num_identical} of {report.num_segments} segments have PyTorch's "
            f"tokens (limit {MIN_IDENTICAL_SHARE:.0%}); no bundle was written. Activations may be too large "
            "for float16: leave the variant out"
        )


def serve(
    model: OnnxModel, sources: Sequence[Sequence[int]], *, shortlist: Shortlist | None
) -> list[Hypothesis]:
    """Decode all sources together with the serving decoder on the CPU, in this thread.

    Args:
        model: loaded graphs, with `use_shortlist` exactly when a shortlist is given.
        sources: token ids with the final end-of-sentence.
        shortlist: limits each source's output.
    """
    runner = OnnxRunner(model, max_rows=_MAX_ROWS)
    return serve_with(runner, model.manifest, sources, shortlist=shortlist)


def serve_with(
    runner: ModelRunner,
    manifest: Manifest,
    sources: Sequence[Sequence[int]],
    *,
    shortlist: Shortlist | None,
) -> list[Hypothesis]:
    """As `serve`, with any runner of the manifest's model."""
    lane = Lane(manifest.id, runner, max_admission_tokens=1024, min_newcomers=8, observer=SilentObserver())
    outcomes: dict[int, Outcome] = {}
    for index, ids in enumerate(sources):
        limit = _limit(manifest, ids)

        def deliver(outcome: Outcome, index: int = index) -> None:
            outcomes[index] = outcome

        lane.add(
            Entry(
                ids,
                GreedySearch(eos_id=manifest.tokens.eos_id, max_target_tokens=limit),
                max_target_tokens=limit,
                submitted_at_s=0.0,
                deliver=deliver,
                candidates=None if shortlist is None else shortlist.candidates(ids),
            )
        )
    while lane.has_work:
        lane.tick()
    hypotheses = []
    for index in range(len(sources)):
        result = outcomes[index].result
        if isinstance(result, DragomanError):
            # The decoder's own words for scores that are no numbers; a caller of the service never sees them.
            reason = result.__cause__ if isinstance(result.__cause__, ValueError) else result.message
            raise VerificationFailed(f"the serving decoder failed: {reason}") from result
        hypotheses.append(result[0])
    return hypotheses


def reference_translations(
    checkpoint: Checkpoint,
    sources: Sequence[Sequence[int]],
    *,
    limits: Sequence[int],
    shortlist: Shortlist | None,
    progress: Callable[[int], None] = lambda _: None,
) -> list[GreedyResult]:
    """Decode all sources with the PyTorch model, in batches of similar length."""
    module = to_module(checkpoint)
    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    results: dict[int, GreedyResult] = {}
    for start in range(0, len(order), _TORCH_BATCH):
        progress(start)
        batch = order[start : start + _TORCH_BATCH]
        length = max(len(sources[index]) for index in batch)
        source_ids = torch.full((len(batch), length), checkpoint.config.eos_id)
        source_mask = torch.zeros((len(batch), length), dtype=torch.bool)
        for row, index in enumerate(batch):
            source_ids[row, : len(sources[index])] = torch.tensor(sources[index])
            source_mask[row, : len(sources[index])] = True
        allowed = None
        if shortlist is not None:
            allowed = [
                torch.from_numpy(shortlist.candidates(sources[index]).astype("int64")) for index in batch
            ]
        answers = greedy(
            module,
            source_ids,
            source_mask,
            max_steps=torch.tensor([limits[index] for index in batch]),
            allowed=allowed,
        )
        results.update(zip(batch, answers, strict=True))
    return [results[index] for index in range(len(sources))]


def _runner(bundle: Bundle, variant: Variant, *, use_shortlist: bool) -> ModelRunner:
    if variant == "cuda-fp16":
        model = load_device_model(bundle, variant=variant, device=Device("cpu"))
        return DeviceRunner(model, max_rows=_MAX_ROWS)
    return OnnxRunner(load_model(bundle, variant=variant, use_shortlist=use_shortlist), max_rows=_MAX_ROWS)


def _limit(manifest: Manifest, ids: Sequence[int]) -> int:
    limits = manifest.limits
    return DecodingOptions().target_limit(
        len(ids), default_ratio=limits.max_target_ratio, model_limit=limits.max_target_tokens
    )
