"""FastAPI over CTranslate2 int8, as it is usually put together; the other side of `benchmarks.load`.

    python -m benchmarks.peers.ctranslate2_server --model FOLDER --tokenizer FILE --replicas N --port N \
        [--micro-batch] [--vmap]

Plain, every request is a ``translate_batch`` of its own in a thread; with ``--micro-batch`` requests that
wait are translated together. Greedy, as many replicas of one thread as cores, the same request and the
fields of the answer that the load client reads. Needs ``pip install ctranslate2``.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import ctranslate2
import sentencepiece
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers.micro_batcher import MicroBatcher, Pieces

_MAX_BATCH = 64
_MAX_TARGET_TOKENS = 384


class Body(BaseModel):
    """A request; the languages are the model's."""

    texts: list[str]
    source: str
    target: str


class Segment(BaseModel):
    """What the load client counts."""

    target: str
    num_target_tokens: int


class Text(BaseModel):
    """One text is one segment here: nothing is split."""

    text: str
    segments: list[Segment]


class Answer(BaseModel):
    """The answer."""

    texts: list[Text]


def make_app(
    model: Path, tokenizer: Path, *, num_replicas: int, micro_batch: bool, use_vmap: bool
) -> FastAPI:
    """The server over loaded weights."""
    translator = ctranslate2.Translator(
        str(model), device="cpu", compute_type="int8", inter_threads=num_replicas, intra_threads=1
    )
    processor = sentencepiece.SentencePieceProcessor()
    processor.Load(str(tokenizer))
    batchers: list[MicroBatcher] = []

    def translate_batch(sources: list[Pieces]) -> Sequence[Pieces]:
        results = translator.translate_batch(
            sources, beam_size=1, max_decoding_length=_MAX_TARGET_TOKENS, use_vmap=use_vmap
        )
        return [result.hypotheses[0] for result in results]

    def text_of(target: Pieces) -> Text:
        text = processor.DecodePieces(target)
        # The end-of-sentence is decoded and not among the pieces.
        return Text(text=text, segments=[Segment(target=text, num_target_tokens=len(target) + 1)])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if micro_batch:
            batchers.append(MicroBatcher(translate_batch, num_replicas=num_replicas, max_batch=_MAX_BATCH))
        yield
        for batcher in batchers:
            await batcher.close()

    app = FastAPI(lifespan=lifespan)

    if micro_batch:

        @app.post("/v1/translate")
        async def translate_together(body: Body) -> Answer:
            sources = [processor.EncodeAsPieces(text) for text in body.texts]
            targets = await asyncio.gather(*map(batchers[0].translate, sources))
            return Answer(texts=[text_of(target) for target in targets])

    else:

        @app.post("/v1/translate")
        def translate_alone(body: Body) -> Answer:
            sources = [processor.EncodeAsPieces(text) for text in body.texts]
            return Answer(texts=[text_of(target) for target in translate_batch(sources)])

    return app


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="what write_ctranslate2_model made")
    parser.add_argument("--tokenizer", type=Path, required=True, help="SentencePiece model")
    parser.add_argument("--replicas", type=int, required=True, help="of one thread each")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--micro-batch", action="store_true", help="translate what waits together")
    parser.add_argument("--vmap", action="store_true", help="limit the output to the vocabulary map")
    arguments = parser.parse_args()
    app = make_app(
        arguments.model,
        arguments.tokenizer,
        num_replicas=arguments.replicas,
        micro_batch=arguments.micro_batch,
        use_vmap=arguments.vmap,
    )
    uvicorn.run(app, host="127.0.0.1", port=arguments.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
