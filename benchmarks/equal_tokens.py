"""Whether both sides run the same model: in float32 they must choose the same tokens with the same scores."""

from __future__ import annotations

from dataclasses import dataclass

from app.decoding.options import DecodingOptions
from benchmarks.local_engine import LocalEngine
from benchmarks.peers.ctranslate2_engine import CTranslate2Engine
from benchmarks.peers.ctranslate2_model import vocabulary
from benchmarks.twin_models import TwinModels
from benchmarks.workload import Workload

_MAX_SCORE_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Equality:
    """How many sentences came out the same.

    Attributes:
        model: which.
        beam_size: 1 is greedy.
        num_equal: sentences with the same tokens whose scores differ by less than 1e-3.
        num_sentences: compared.
    """

    model: str
    beam_size: int
    num_equal: int
    num_sentences: int


def compare_float32(model: str, twins: TwinModels, workload: Workload, *, beam_size: int) -> Equality:
    """Translate with both sides' float32 models, without a shortlist."""
    peer = CTranslate2Engine(twins.ctranslate2_float32, vocabulary(twins.checkpoint), compute_type="float32")
    num_equal = 0
    with LocalEngine.open(twins.bundle, variant="cpu-fp32") as engine:
        for limit, sources in workload.by_limit().items():
            theirs = peer.translate(sources, beam_size=beam_size, max_target_tokens=limit)
            ours = engine.translate(sources, DecodingOptions(beam_size=beam_size), max_target_tokens=limit)
            num_equal += sum(
                mine.token_ids == other.token_ids and abs(mine.score - other.score) < _MAX_SCORE_DIFFERENCE
                for (mine, *_), (other, *_) in zip(ours, theirs, strict=True)
            )
    return Equality(model, beam_size, num_equal, len(workload.sources))
