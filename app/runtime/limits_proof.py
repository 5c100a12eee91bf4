"""Whether a model's graphs have as many positions as its manifest states; found at load, in milliseconds.

Short texts translate however few there are, so that nothing else finds out before the first long one.
"""

from __future__ import annotations

import numpy as np

from app.bundle import Bundle
from app.errors import BundleCorrupt
from app.runtime.onnx_model import OnnxModel
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.runner import BeamStepInput, LogitAdjustments, RowGroup, SearchKind, SourceRow

_SOURCE_TOKENS = 8
_NUM_CANDIDATES = 64


def prove_limits(bundle: Bundle, model: OnnxModel) -> None:
    """Run the encoder over the longest source, and every step graph at the last target position.

    Raises:
        BundleCorrupt: a graph refuses what the manifest allows; names graph and limit.
    """
    limits = bundle.manifest.limits
    try:
        _encode(model, limits.max_source_tokens)
    except Exception as error:
        raise _too_few(bundle, "the encoder", "max_source_tokens", limits.max_source_tokens) from error
    runner = OnnxRunner(model, max_rows=1)
    proven: set[SearchKind] = set()
    for index, group in enumerate(runner.groups):
        if group.kind in proven or group.source_length < limits.max_source_tokens:
            continue
        proven.add(group.kind)
        try:
            _step(runner, index, group, model, position=limits.max_target_tokens - 1)
        except Exception as error:
            what = f"the step of {group.kind.value} search"
            raise _too_few(bundle, what, "max_target_tokens", limits.max_target_tokens) from error


def _encode(model: OnnxModel, num_tokens: int) -> None:
    """Encode sources of this length: none of them where the graph allows it, which takes no time."""
    try:
        _run_encoder(model, num_sources=0, num_tokens=_SOURCE_TOKENS)
    except Exception:  # noqa: BLE001  # whatever it says, it needs a source
        num_sources = 1
    else:
        num_sources = 0
    _run_encoder(model, num_sources=num_sources, num_tokens=num_tokens)


def _run_encoder(model: OnnxModel, *, num_sources: int, num_tokens: int) -> None:
    shape = num_sources, num_tokens
    ids = np.full(shape, model.manifest.tokens.eos_id, dtype=np.int64)
    model.encoder.run(None, {"source_ids": ids, "source_mask": np.ones(shape, dtype=np.int32)})


def _step(runner: OnnxRunner, index: int, group: RowGroup, model: OnnxModel, *, position: int) -> None:
    tokens, vocabulary_size = model.manifest.tokens, model.manifest.sizes.vocabulary_size
    candidates = None
    if model.candidates is not None:
        candidates = np.arange(min(_NUM_CANDIDATES, vocabulary_size), dtype=np.int32)
    source = [tokens.eos_id] * _SOURCE_TOKENS
    runner.admit(index, [SourceRow(0, source, position + 1, candidates)])
    positions = np.array([position])
    last_ids = np.full((1, group.num_beams), tokens.eos_id, dtype=np.int64)
    if group.kind is SearchKind.GREEDY:
        runner.step(index, last_ids[0], positions)
        return
    unchanged = LogitAdjustments(
        rows=np.zeros(0, dtype=np.int64),
        token_ids=np.zeros(0, dtype=np.int64),
        divisors=np.zeros(0, dtype=np.float32),
        addends=np.zeros(0, dtype=np.float32),
    )
    runner.beam_step(
        index,
        BeamStepInput(
            last_ids=last_ids,
            positions=positions,
            scores=np.zeros(last_ids.shape, dtype=np.float32),
            parents=np.arange(group.num_beams)[None],
            num_candidates=min(2 * group.num_beams, vocabulary_size),
            adjustments=unchanged if group.kind is SearchKind.GUIDED else None,
        ),
    )


def _too_few(bundle: Bundle, what: str, limit: str, num_tokens: int) -> BundleCorrupt:
    return BundleCorrupt(
        f"bundle {bundle.path}: the manifest states {limit} {num_tokens}, and {what} cannot be run at that "
        "length; export the bundle again, or state the limit it was exported with"
    )
