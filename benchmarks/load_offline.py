"""The engine that the service runs, without service: in a process of its own, pinned as the servers are.

    python -m benchmarks.load_offline --bundle FOLDER [--no-shortlist]

Lines of JSON on standard input: ``{"prepare": {"texts": [...], "threads": N}}``, then ``{"saturated": ROWS}``
or ``{"alone": NUM}`` any number of times. Texts are cut into segments before anything is timed, as the
service cuts them, so both decode the same.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.bundle import Bundle, open_bundle
from app.runtime.preparation import prepare
from app.text import Tokenizer
from benchmarks.contest import timed
from benchmarks.load_client import serve_lines
from benchmarks.local_engine import LocalEngine, num_tokens

ROW_COUNTS = (32, 64, 128)
"""Rows of a row group that are tried for everything at once."""
_NUM_WARM_UP = 32


@dataclass(frozen=True)
class Saturated:
    """Everything at once.

    Attributes:
        requests_per_s: texts a second; one is a request of the load.
        tokens_per_s: target tokens a second.
        max_rows: rows of a row group.
    """

    requests_per_s: float
    tokens_per_s: float
    max_rows: int


class OfflineEngine:
    """The engine over one bundle and the texts of the load."""

    def __init__(self, bundle: Bundle, *, use_shortlist: bool) -> None:
        """Nothing is loaded before `answer` is asked to prepare."""
        self._bundle = bundle
        self._use_shortlist = use_shortlist
        self._sources: list[list[tuple[int, ...]]] = []
        self._engines: dict[int, LocalEngine] = {}
        self._num_threads = 1

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what one line asks."""
        if "prepare" in request:
            return self._prepare(request["prepare"]["texts"], request["prepare"]["threads"])
        if "saturated" in request:
            return asdict(self._saturated(request["saturated"]))
        return {"seconds": self._alone(request["alone"])}

    def close(self) -> None:
        """End the threads."""
        for engine in self._engines.values():
            engine.__exit__(None, None, None)

    def _prepare(self, texts: Sequence[str], num_threads: int) -> dict[str, Any]:
        manifest = self._bundle.manifest
        tokenizer = Tokenizer.open(self._bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)
        self._sources = [
            [
                segment.source_ids
                for segment in prepare(
                    text,
                    language=manifest.pairs[0].source,
                    tokenizer=tokenizer,
                    max_source_tokens=manifest.limits.max_source_tokens,
                ).segments
            ]
            for text in texts
        ]
        self._num_threads = num_threads
        return {"num_segments": sum(map(len, self._sources))}

    def _engine(self, max_rows: int) -> LocalEngine:
        if max_rows not in self._engines:
            engine = LocalEngine.open(
                self._bundle,
                use_shortlist=self._use_shortlist,
                num_threads=self._num_threads,
                max_rows=max_rows,
            )
            self._engines[max_rows] = engine.__enter__()
            warm_up = [segment for segments in self._sources[:_NUM_WARM_UP] for segment in segments]
            engine.translate(warm_up)
            engine.one_by_one(warm_up[:4])
        return self._engines[max_rows]

    def _saturated(self, max_rows: int) -> Saturated:
        engine = self._engine(max_rows)
        segments = [segment for segments in self._sources for segment in segments]
        longest_first = sorted(segments, key=len, reverse=True)
        run = timed(lambda: num_tokens(engine.translate(longest_first)))
        return Saturated(len(self._sources) / run.wall_s, run.num_tokens / run.wall_s, max_rows)

    def _alone(self, num_texts: int) -> list[float | None]:
        """Seconds of each text of one segment; None for others: the service decodes theirs together."""
        engine = self._engine(ROW_COUNTS[0])
        seconds: list[float | None] = []
        for segments in self._sources[:num_texts]:
            started_at_s = time.perf_counter()
            if len(segments) == 1:
                engine.one_by_one(segments)
            seconds.append(time.perf_counter() - started_at_s if len(segments) == 1 else None)
        return seconds


def main() -> None:
    """Answer lines until there are no more."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--no-shortlist", action="store_true")
    arguments = parser.parse_args()
    bundle = open_bundle(arguments.bundle)
    use_shortlist = bundle.manifest.shortlist is not None and not arguments.no_shortlist
    engine = OfflineEngine(bundle, use_shortlist=use_shortlist)
    try:
        serve_lines(engine.answer)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
