"""CTranslate2 in this process, behind the same call as our LocalEngine: token ids in, hypotheses out.

For comparing answers; what is timed runs in a process of its own (ctranslate2_process.py). Needs
``pip install ctranslate2`` (4.8 was used); nothing of the service does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.ctranslate2_model import open_translator


@dataclass(frozen=True)
class PeerHypothesis:
    """One hypothesis of CTranslate2.

    Attributes:
        token_ids: target tokens without end-of-sentence.
        score: its length-normalised score.
    """

    token_ids: tuple[int, ...]
    score: float


class CTranslate2Engine:
    """A loaded model."""

    def __init__(
        self,
        folder: Path,
        pieces: Sequence[str],
        *,
        compute_type: str,
        num_threads: int = 1,
        use_vmap: bool = False,
    ) -> None:
        """Load a model.

        Args:
            folder: what `write_ctranslate2_model` made.
            pieces: the vocabulary by id.
            compute_type: "int8" or "float32".
            num_threads: replicas, of one thread each.
            use_vmap: limit each batch's output to its vocabulary map, this engine's shortlist.
        """
        self._translator = open_translator(folder, compute_type=compute_type, num_threads=num_threads)
        self._pieces = pieces
        self._id_of = {piece: index for index, piece in enumerate(pieces)}
        self._use_vmap = use_vmap

    def translate(
        self,
        sources: Sequence[Sequence[int]],
        *,
        beam_size: int = 1,
        num_hypotheses: int = 1,
        length_penalty: float = 1.0,
        max_target_tokens: int = 384,
        batch_size: int = 32,
    ) -> list[tuple[PeerHypothesis, ...]]:
        """Translate all; results in the order of the sources, hypotheses best first.

        Args:
            sources: token ids, each with the final end-of-sentence, which this engine adds itself.
            beam_size: 1 is greedy.
            num_hypotheses: wanted of each segment.
            length_penalty: exponent of the length normalisation.
            max_target_tokens: limit of every segment.
            batch_size: sentences a batch, cut from the sources sorted by length.
        """
        results = self._translator.translate_batch(
            [[self._pieces[token] for token in source[:-1]] for source in sources],
            beam_size=beam_size,
            num_hypotheses=num_hypotheses,
            length_penalty=length_penalty,
            max_decoding_length=max_target_tokens,
            max_batch_size=batch_size,
            use_vmap=self._use_vmap,
            return_scores=True,
        )
        return [
            tuple(
                PeerHypothesis(tuple(self._id_of[piece] for piece in tokens), score)
                for tokens, score in zip(result.hypotheses, result.scores, strict=True)
            )
            for result in results
        ]
