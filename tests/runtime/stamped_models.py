"""Models whose translations say which loading of a model made them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from echo_engine import EchoRunner

from app.runtime.request import PairInfo
from app.runtime.runner import Int64Array, SourceRow, StepOutput
from app.runtime.served_model import ServedModel
from app.text import Tokenizer


class StampRunner(EchoRunner):
    """Translates everything into one piece of the vocabulary, repeated: that of its loading."""

    def __init__(self, tokenizer: Tokenizer, loading: Loading) -> None:
        super().__init__(tokenizer.vocabulary_size, lambda: None)
        self._loading = loading
        self._stamp_id = tokenizer.encode_sources([loading.stamp])[0][0]

    def admit(self, group: int, newcomers: Sequence[SourceRow]) -> None:
        self._loading.num_admitted += len(newcomers)
        super().admit(group, newcomers)

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        self._loading.before_step()
        output = super().step(group, last_ids, positions)
        token_ids = np.where(output.token_ids == 0, 0, self._stamp_id)
        return StepOutput(token_ids, np.full(len(token_ids), self._loading.log_prob, dtype=np.float32))


@dataclass(eq=False)
class Loading:
    """One loading of a model, which says who translated.

    Attributes:
        stamp: the word that all its translations consist of.
        runners: those it made, as far as they are still in memory.
    """

    stamp: str
    id: str = "en-pt"
    log_prob: float = -0.5
    before_step: Callable[[], None] = lambda: None
    before_runner: Callable[[], None] = lambda: None
    num_admitted: int = 0
    runners: weakref.WeakSet[EchoRunner] = field(default_factory=weakref.WeakSet)

    def model(self, tokenizer: Tokenizer) -> ServedModel:
        source, target = self.id.split("-")

        def make_runner(_worker: int) -> StampRunner:
            self.before_runner()
            runner = StampRunner(tokenizer, self)
            self.runners.add(runner)
            return runner

        return ServedModel(
            id=self.id,
            pairs=(PairInfo(source, target, self.id),),
            tokenizer=tokenizer,
            shortlist=None,
            eos_id=tokenizer.eos_id,
            max_source_tokens=16,
            max_target_tokens=32,
            max_target_ratio=2.0,
            make_runner=make_runner,
        )

    def translated(self, text: str) -> bool:
        return set(text.lower().split()) == {self.stamp}
