"""BLEU and chrF of the shipped models through POST /translate, by variant.

    python -m benchmarks.quality --testsets DIR [--variants cpu-fp32,cpu-int8] [--json FILE]

The JSON is what `dragoman export record-quality` writes into bundles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import httpx
import sacrebleu

from benchmarks.server import MeasuredServer
from benchmarks.testsets import NAMES, TestSet, load

_DIRECTIONS = (("en", "pt"), ("pt", "en"))
_CONCURRENCY = 32


async def translate_lines(url: str, lines: list[str], *, source: str, target: str) -> list[str]:
    """One POST /translate a line, a few dozen at a time."""
    permits = asyncio.Semaphore(_CONCURRENCY)

    async def one(client: httpx.AsyncClient, line: str) -> str:
        async with permits:
            answer = await client.post("/translate", json={"q": line, "source": source, "target": target})
        answer.raise_for_status()
        return str(answer.json()["translatedText"])

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return list(await asyncio.gather(*(one(client, line) for line in lines)))


def score(testset: TestSet, outputs: list[str]) -> dict[str, object]:
    """Score with sacrebleu, with their signatures."""
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    bleu_score = bleu.corpus_score(outputs, [testset.references])
    chrf_score = chrf.corpus_score(outputs, [testset.references])
    return {
        "num_segments": len(outputs),
        "bleu": round(bleu_score.score, 2),
        "bleu_signature": str(bleu.get_signature()),
        "chrf": round(chrf_score.score, 2),
        "chrf_signature": str(chrf.get_signature()),
    }


def main() -> None:
    """Score every test set, direction and variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--testsets", type=Path, required=True, help="folder with NAME.en and NAME.pt_BR")
    parser.add_argument("--variants", default="cpu-fp32,cpu-int8")
    parser.add_argument("--json", type=Path, help="write the scores here")
    arguments = parser.parse_args()

    rows: list[dict[str, object]] = []
    print(f"{'test set':15s} {'pair':6s} {'variant':9s} {'BLEU':>6s} {'chrF':>6s}")
    for variant in arguments.variants.split(","):
        with MeasuredServer(["--variant", variant]) as server:
            bundles = {
                (model["source"], model["target"]): model["id"]
                for model in httpx.get(f"{server.url}/v1/models").json()["models"]
            }
            for name in NAMES:
                for source, target in _DIRECTIONS:
                    testset = load(arguments.testsets, name, source=source, target=target)
                    outputs = asyncio.run(
                        translate_lines(server.url, testset.sources, source=source, target=target)
                    )
                    scores = score(testset, outputs)
                    pair = f"{source}-{target}"
                    print(
                        f"{name:15s} {pair:6s} {variant:9s} {scores['bleu']:6.2f} {scores['chrf']:6.2f}",
                        flush=True,
                    )
                    rows.append(
                        {
                            "bundle": bundles[source, target],
                            "test_set": name,
                            "variant": variant,
                            "shortlist": True,
                        }
                        | scores
                    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
