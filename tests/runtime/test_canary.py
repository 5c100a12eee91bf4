"""Which translations of the canary show that a model is damaged, at a start and at a reload alike."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest
from echo_engine import PATIENCE_S, EchoRunner
from stamped_models import Loading

from app.bundle import default_directory, discover
from app.errors import BundleUnsupported
from app.runtime import supervision
from app.runtime.canary import prove
from app.runtime.engine import Engine, EngineOptions
from app.runtime.engine_options import make_lane
from app.runtime.events import SilentObserver
from app.runtime.runner import Int64Array, StepOutput
from app.runtime.served_model import ServedModel, load_served_model
from app.text import Tokenizer

EOS_ID = 0
Say = Callable[[int], int]
"""The token at a position."""


class SayingRunner(EchoRunner):
    """Translates everything into the same."""

    def __init__(self, vocabulary_size: int, say: Say) -> None:
        super().__init__(vocabulary_size, lambda: None)
        self._say = say

    def step(self, group: int, last_ids: Int64Array, positions: Int64Array) -> StepOutput:
        del group, last_ids
        token_ids = np.array([self._say(int(position)) for position in positions], dtype=np.int64)
        return StepOutput(token_ids, np.full(len(token_ids), -0.5, dtype=np.float32))


def saying(tokenizer: Tokenizer, say: Say) -> ServedModel:
    model = Loading("bird").model(tokenizer)
    return ServedModel(
        **vars(model) | {"make_runner": lambda _worker: SayingRunner(tokenizer.vocabulary_size, say)}
    )


def once(*tokens: int) -> Say:
    return lambda position: tokens[position] if position < len(tokens) else EOS_ID


def again_and_again(*tokens: int) -> Say:
    return lambda position: tokens[position % len(tokens)]


UNSOUND = {
    "nothing": (once(), "is empty"),
    "one token for ever": (again_and_again(40), "repeats"),
    "two tokens for ever": (again_and_again(40, 41), "repeats"),
    "three tokens for ever": (again_and_again(40, 41, 42), "repeats"),
}
SOUND = {
    "a word": once(40),
    "a word that repeats itself and ends": once(*[40] * 3),
    "more than the limit allows": lambda position: 40 + position,
}


@asynccontextmanager
async def serving(*models: ServedModel) -> AsyncIterator[Engine]:
    engine = Engine(models, EngineOptions(num_workers=1))
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop(drain_s=PATIENCE_S)


@contextmanager
def looking_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(supervision, "LOOK_EVERY_S", 0.001)
        yield


@pytest.mark.parametrize("name", UNSOUND)
async def test_a_reload_refuses_a_model_that_makes_nonsense_of_the_canary(
    tokenizer: Tokenizer, name: str
) -> None:
    say, fault = UNSOUND[name]
    async with serving(Loading("cat").model(tokenizer)) as engine:
        with pytest.raises(BundleUnsupported, match=f"bundle en-pt .*'Hello.' {fault}.*export it again"):
            await engine.exchange([saying(tokenizer, say)], order=["en-pt"])


@pytest.mark.parametrize("name", UNSOUND)
async def test_a_start_with_a_model_that_makes_nonsense_of_the_canary_ends(
    tokenizer: Tokenizer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    say, fault = UNSOUND[name]
    with looking_often(monkeypatch):
        async with serving(saying(tokenizer, say)) as engine, asyncio.timeout(PATIENCE_S):
            reason = await engine.supervise(max_heartbeat_age_s=PATIENCE_S)
            assert not engine.started
    assert fault in reason


@pytest.mark.parametrize("name", SOUND)
async def test_whatever_may_be_a_translation_is_accepted(tokenizer: Tokenizer, name: str) -> None:
    async with serving(Loading("cat").model(tokenizer)) as engine:
        await engine.exchange([saying(tokenizer, SOUND[name])], order=["en-pt"])


@pytest.mark.parametrize("use_shortlist", [False, True])
def test_the_bundles_that_are_shipped_are_sound(use_shortlist: bool) -> None:
    for bundle in discover(default_directory()):
        model = load_served_model(bundle, variant="cpu-int8", max_rows=4, use_shortlist=use_shortlist)
        options = EngineOptions(num_workers=1)
        prove(model, make_lane(model, options=options, observer=SilentObserver(), clock=time.monotonic))
