from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import sentencepiece
from echo_engine import PATIENCE_S, EchoRunner, Gate, MakeEngine

from app.runtime.engine import Engine, EngineOptions, ServedModel
from app.runtime.events import SilentObserver
from app.runtime.request import PairInfo
from app.text import Tokenizer

EOS_ID = 0
_WORDS = (
    "the a small red old cat bird house train door book",
    "sees likes finds has takes every one and",
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer of 60 pieces, trained on words in a fixed order."""
    words = " ".join(_WORDS).split()
    count = len(words)
    sentences = [
        " ".join(words[(start + step * place) % count] for place in range(6)).capitalize() + "."
        for start in range(count)
        for step in range(1, 6)
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=60,
        character_coverage=1.0,
        hard_vocab_limit=False,
        eos_id=EOS_ID,
        unk_id=1,
        bos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return Tokenizer(processor, eos_id=EOS_ID)


@pytest.fixture
async def make_engine(tokenizer: Tokenizer) -> AsyncIterator[MakeEngine]:
    """Engines that are stopped at the end, on a loop where no failure goes unnoticed."""
    unnoticed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unnoticed.append(context))
    engines: list[Engine] = []
    gates: list[Callable[[], None]] = []

    def make(
        *,
        before_step: Callable[[], None] = lambda: None,
        pairs: Sequence[tuple[str, str]] = (("en", "pt"),),
        start: bool = True,
        observer: SilentObserver | None = None,
        clock: Callable[[], float] | None = None,
        max_beam_size: int = 1,
        make_runner: Callable[[int, Callable[[], None]], EchoRunner] = EchoRunner,
        **options: float,
    ) -> Engine:
        gates.append(before_step)
        models = [
            ServedModel(
                id=f"{source}-{target}",
                pairs=(PairInfo(source, target, f"{source}-{target}"),),
                tokenizer=tokenizer,
                shortlist=None,
                eos_id=tokenizer.eos_id,
                max_source_tokens=16,
                max_target_tokens=32,
                max_target_ratio=2.0,
                make_runner=lambda _worker: make_runner(tokenizer.vocabulary_size, before_step),
                max_beam_size=max_beam_size,
            )
            for source, target in pairs
        ]
        more = {} if clock is None else {"clock": clock}
        engine_options = EngineOptions(**({"num_workers": 2} | options))  # type: ignore[arg-type]
        engine = Engine(models, engine_options, observer=observer, **more)
        if start:
            engine.start()
            engines.append(engine)
        return engine

    yield make
    for gate in gates:
        if isinstance(gate, Gate):
            gate.opened.set()
    for engine in engines:
        await engine.stop(drain_s=PATIENCE_S)
        assert engine.num_waiting_tokens == 0
        assert engine.num_running_requests == 0
    await asyncio.sleep(0)
    gc.collect()
    assert unnoticed == []
