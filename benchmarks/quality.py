"""BLEU and chrF of the shipped models in both directions: `dragoman evaluate` over the project's test sets.

    python -m benchmarks.quality --testsets DIR [--variants cpu-fp32,cpu-int8] [--beam-sizes 1,4]
        [--record] [--json FILE]

`--record` writes the scores into the shipped bundles; the JSON is for `dragoman export record-quality`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rich.console import Console

from app.bundle import Variant, default_directory, discover
from benchmarks.testsets import NAMES, TestSet, load
from exporters.quality import add_quality
from model.evaluation import evaluate, measure, quality_scores
from model.evaluation import testset as evaluation_testset
from model.evaluation.bundle_system import BundleSystem
from model.evaluation.report import print_tables
from model.evaluation.significance import DEFAULT_NUM_SAMPLES
from model.evaluation.system import Decoding, Languages


def score(testset: TestSet, outputs: Sequence[str]) -> dict[str, object]:
    """Score with sacrebleu, with their signatures."""
    found = measure(_for_evaluation(testset), outputs)
    return {
        "num_segments": found.num_lines,
        "bleu": round(found.bleu, 2),
        "bleu_signature": found.bleu_signature,
        "chrf": round(found.chrf, 2),
        "chrf_signature": found.chrf_signature,
    }


def main() -> None:
    """Score every test set, direction, variant and beam size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--testsets", type=Path, required=True, help="folder with NAME.en and NAME.pt_BR")
    parser.add_argument("--variants", default="cpu-fp32,cpu-int8")
    parser.add_argument("--beam-sizes", default="1")
    parser.add_argument("--record", action="store_true", help="write the scores into the shipped bundles")
    parser.add_argument("--json", type=Path, help="write the scores here")
    arguments = parser.parse_args()
    wanted = arguments.variants.split(",")
    variants: list[Variant] = [variant for variant in get_args(Variant) if variant in wanted]
    if len(variants) != len(wanted):
        parser.error(f"--variants is {arguments.variants}; known are {', '.join(get_args(Variant))}")
    decodings = [Decoding(int(size)) for size in arguments.beam_sizes.split(",")]

    rows: list[dict[str, object]] = []
    for bundle in discover(default_directory()):
        (pair,) = bundle.manifest.pairs
        systems = [
            BundleSystem(
                f"{pair.source}-{pair.target}.{variant}.beam-{decoding.beam_size}",
                bundle,
                Languages(pair.source, pair.target),
                variant=variant,
                use_shortlist=True,
                decoding=decoding,
            )
            for variant in variants
            for decoding in decodings
        ]
        testsets = [
            _for_evaluation(load(arguments.testsets, name, source=pair.source, target=pair.target))
            for name in NAMES
        ]
        found = evaluate(systems, testsets, num_samples=DEFAULT_NUM_SAMPLES, console=Console(stderr=True))
        print_tables(found, Console())
        scores = quality_scores(found)[bundle.path]
        rows += [{"bundle": bundle.manifest.id} | part.model_dump(mode="json") for part in scores]
        if arguments.record:
            add_quality(bundle.path, scores)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def _for_evaluation(testset: TestSet) -> evaluation_testset.TestSet:
    return evaluation_testset.TestSet(testset.name, tuple(testset.sources), tuple(testset.references))


if __name__ == "__main__":
    main()
