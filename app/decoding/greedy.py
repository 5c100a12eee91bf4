"""Greedy search over one segment: keep the most probable token at every step."""

from __future__ import annotations

from app.decoding.hypothesis import FinishReason, Hypothesis, LengthNormalisation


class GreedySearch:
    """Collects the tokens of one row until end-of-sentence or its limit.

    A search never sees the cache or the model: it is fed the chosen token of its row after every
    step.
    """

    num_beams = 1

    def __init__(
        self,
        *,
        eos_id: int,
        max_target_tokens: int,
        length_penalty: float = 1.0,
        normalisation: LengthNormalisation = LengthNormalisation.POWER,
    ) -> None:
        """Start an empty hypothesis.

        Args:
            eos_id: token that ends the target.
            max_target_tokens: most decoded tokens, end-of-sentence included; at least 1.
            length_penalty: of the hypothesis's score; greedy search itself does not use it.
            normalisation: likewise.
        """
        self._length_penalty = length_penalty
        self._normalisation = normalisation
        self._eos_id = eos_id
        self._max_target_tokens = max_target_tokens
        self._token_ids: list[int] = []
        self._sum_log_probs = 0.0
        self._finish_reason: FinishReason | None = None

    @property
    def num_decoded(self) -> int:
        """Tokens decoded so far without end-of-sentence: the position of the next step."""
        return len(self._token_ids)

    @property
    def last_id(self) -> int:
        """The token decoded last; end-of-sentence before the first step, where it is ignored."""
        return self._token_ids[-1] if self._token_ids else self._eos_id

    @property
    def finished(self) -> bool:
        """Whether `hypothesis` may be taken."""
        return self._finish_reason is not None

    def advance(self, token_id: int, log_prob: float) -> bool:
        """Take the token chosen for this row at this step; say whether the search is finished."""
        self._sum_log_probs += log_prob
        if token_id == self._eos_id:
            self._finish_reason = FinishReason.EOS
        else:
            self._token_ids.append(token_id)
            if len(self._token_ids) >= self._max_target_tokens:
                self._finish_reason = FinishReason.LENGTH
        return self.finished

    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The one finished hypothesis."""
        if self._finish_reason is None:
            raise RuntimeError("the search is not finished")
        return (
            Hypothesis(
                tuple(self._token_ids),
                self._sum_log_probs,
                self._finish_reason,
                self._length_penalty,
                self._normalisation,
            ),
        )
