"""Beam search whose choice the request guides: forced, forbidden and penalised tokens, attention kept.

With one beam it is greedy search under the same guidance.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.decoding.beam import IMPOSSIBLE, BeamOptions, BeamSearch
from app.decoding.guidance import Adjustment, Guidance, adjustments
from app.decoding.hypothesis import Float32Array


class GuidedBeamSearch(BeamSearch):
    """A `BeamSearch` that also says, before every step, which logits of its beams are to be changed."""

    def __init__(self, *, eos_id: int, options: BeamOptions, guidance: Guidance) -> None:
        """Start with the empty target; the prefix of the guidance takes one step a token.

        Args:
            eos_id: token that ends the target.
            options: as for `BeamSearch`; `max_target_tokens` counts the prefix.
            guidance: what is asked.

        Raises:
            ValueError: the prefix leaves no room for another token.
        """
        if len(guidance.prefix) >= options.max_target_tokens:
            raise ValueError(
                f"the prefix has {len(guidance.prefix)} tokens; the limit is {options.max_target_tokens} and "
                "the model must have room to go on"
            )
        super().__init__(eos_id=eos_id, options=options)
        self._guidance = guidance

    @property
    def keeps_attention(self) -> bool:
        """Whether `advance` wants the attention of every step."""
        return self._guidance.keeps_attention

    def adjustments(self) -> list[list[Adjustment]]:
        """For each live beam what changes at the next step; nothing while tokens are forced."""
        if self._forced_id is not None:
            return [[] for _ in range(self.num_beams)]
        return [
            [] if score == IMPOSSIBLE else adjustments(self._guidance, ids, eos_id=self._eos_id)
            for ids, score in zip(self._token_ids, self.scores, strict=True)
        ]

    def advance(
        self,
        token_ids: Sequence[int],
        beams: Sequence[int],
        scores: Sequence[float],
        attention: Float32Array | None = None,
    ) -> bool:
        """Take the step's outcome, which counts only once the prefix is over; see `BeamSearch.advance`."""
        kept = attention if self._guidance.keeps_attention else None
        if self._forced_id is None:
            return super().advance(token_ids, beams, scores, kept)
        self.force(self._forced_id, kept)
        return False

    @property
    def _forced_id(self) -> int | None:
        """The prefix's token for the next step, or None when the model chooses."""
        prefix = self._guidance.prefix
        return prefix[self.num_decoded] if self.num_decoded < len(prefix) else None
