"""The service as its users meet it: start-up, memory, latency, throughput, and the same answer for everyone.

    python -m benchmarks.service [--testsets DIR] [--variants cpu-int8,cpu-fp32] [--json FILE]

Without test sets the texts are the project's own sentences (tests/data/marian).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.server import MeasuredServer
from benchmarks.testsets import load

_SENTENCES = Path(__file__).resolve().parent.parent / "tests" / "data" / "marian" / "sentences.en.txt"
_NUM_LATENCIES = 100
_NUM_CLIENTS = 64
_SENTENCES_PER_CLIENT = 20
_BUSY_CLIENTS = 32


@dataclass(frozen=True)
class ServiceFigures:
    """What one variant of the service measured; times in the unit of the name.

    Attributes:
        variant: graphs served.
        startup_s: from starting the process to the first right answer, both directions loaded.
        rss_idle_mb: after the first answer, 10^6 bytes.
        rss_busy_mb: after the load.
        latency_p50_ms: one client, one sentence a request.
        latency_p95_ms: likewise.
        latency_tokens: mean target tokens of those sentences.
        requests_per_s: closed loop of 32 clients, one sentence a request.
        tokens_per_s: target tokens, likewise.
        cpu_share: CPU seconds the server used per second of that load; 2 is two full cores.
        num_different: of 64 clients x 20 sentences at once, answers unlike those of a lone client.
    """

    variant: str
    startup_s: float
    rss_idle_mb: float
    rss_busy_mb: float
    latency_p50_ms: float
    latency_p95_ms: float
    latency_tokens: float
    requests_per_s: float
    tokens_per_s: float
    cpu_share: float
    num_different: int


def _native(text: str) -> dict[str, object]:
    return {"texts": [text], "source": "en", "target": "pt"}


def _num_tokens(answer: httpx.Response) -> int:
    answer.raise_for_status()
    return sum(
        segment["num_target_tokens"] for text in answer.json()["texts"] for segment in text["segments"]
    )


def measure_latency(url: str, sentences: Sequence[str]) -> tuple[list[float], float]:
    """Milliseconds of one request after another, and their mean number of target tokens."""
    times_ms, num_tokens = [], 0
    with httpx.Client(base_url=url, timeout=60) as client:
        for sentence in sentences:
            started_at_s = time.perf_counter()
            answer = client.post("/v1/translate", json=_native(sentence))
            times_ms.append((time.perf_counter() - started_at_s) * 1e3)
            num_tokens += _num_tokens(answer)
    return times_ms, num_tokens / len(times_ms)


async def measure_throughput(url: str, sentences: Sequence[str], num_clients: int) -> tuple[float, int]:
    """Seconds and target tokens of a closed loop: a client sends its next sentence when it has an answer."""
    left = iter(sentences)
    num_tokens = 0

    async def client_loop(client: httpx.AsyncClient) -> None:
        nonlocal num_tokens
        for sentence in left:
            answer = await client.post("/v1/translate", json=_native(sentence))
            num_tokens += _num_tokens(answer)  # not in one statement: the sum is read before the wait

    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        started_at_s = time.perf_counter()
        await asyncio.gather(*(client_loop(client) for _ in range(num_clients)))
        return time.perf_counter() - started_at_s, num_tokens


async def count_differences(url: str, sentences: Sequence[str]) -> int:
    """Answers of many clients at once that differ from those of one client alone."""

    async def translate(client: httpx.AsyncClient, texts: Sequence[str]) -> list[str]:
        answers = [
            await client.post("/translate", json={"q": text, "source": "en", "target": "pt"})
            for text in texts
        ]
        return [str(answer.raise_for_status().json()["translatedText"]) for answer in answers]

    rows = [
        [sentences[(client * 7 + index) % len(sentences)] for index in range(_SENTENCES_PER_CLIENT)]
        for client in range(_NUM_CLIENTS)
    ]
    limits = httpx.Limits(max_connections=_NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        needed = sorted({text for row in rows for text in row})
        alone = dict(zip(needed, await translate(client, needed), strict=True))
        together = await asyncio.gather(*(translate(client, row) for row in rows))
    return sum(
        answer != alone[text]
        for row, answers in zip(rows, together, strict=True)
        for text, answer in zip(row, answers, strict=True)
    )


def measure(variant: str, sentences: Sequence[str]) -> ServiceFigures:
    """Start a server of the variant and take every figure."""
    with MeasuredServer(["--variant", variant]) as server:
        rss_idle_mb = server.rss_mb()
        measure_latency(server.url, sentences[:10])
        times_ms, latency_tokens = measure_latency(server.url, sentences[:_NUM_LATENCIES])
        asyncio.run(measure_throughput(server.url, sentences[:100], _BUSY_CLIENTS))
        cpu_before_s = server.cpu_s()
        elapsed_s, num_tokens = asyncio.run(measure_throughput(server.url, sentences, _BUSY_CLIENTS))
        cpu_share = (server.cpu_s() - cpu_before_s) / elapsed_s
        num_different = asyncio.run(count_differences(server.url, sentences))
        return ServiceFigures(
            variant=variant,
            startup_s=round(server.startup_s, 2),
            rss_idle_mb=round(rss_idle_mb),
            rss_busy_mb=round(server.rss_mb()),
            latency_p50_ms=round(statistics.median(times_ms), 1),
            latency_p95_ms=round(statistics.quantiles(times_ms, n=20)[-1], 1),
            latency_tokens=round(latency_tokens, 1),
            requests_per_s=round(len(sentences) / elapsed_s, 1),
            tokens_per_s=round(num_tokens / elapsed_s),
            cpu_share=round(cpu_share, 2),
            num_different=num_different,
        )


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    """Measure every variant and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--testsets", type=Path, help="folder with flores200-dev.en; default: own sentences")
    parser.add_argument("--variants", default="cpu-int8,cpu-fp32")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()

    if arguments.testsets:
        sentences = load(arguments.testsets, "flores200-dev", source="en", target="pt").sources
    else:
        sentences = [line for line in _SENTENCES.read_text(encoding="utf-8").splitlines() if line.strip()]
    machine = (
        f"{_cpu_model()}, {os.cpu_count()} cores, Python {platform.python_version()}, commit {_commit()}"
    )
    print(f"{machine}\n{len(sentences)} sentences\n")
    figures = [asdict(measure(variant, sentences)) for variant in arguments.variants.split(",")]
    for name in figures[0]:
        print(f"{name:18s}" + "".join(f"{row[name]!s:>12s}" for row in figures))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
