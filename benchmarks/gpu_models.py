"""The models that `benchmarks.gpu_check` runs: the shipped ones, and random ones of a size that matters."""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.bundle import Bundle, default_directory, open_bundle
from app.bundle.manifest import LanguagePair
from app.decoding.options import DecodingOptions
from app.errors import BundleError
from app.text import Tokenizer
from benchmarks.workload import forced
from exporters.checkpoint import Checkpoint
from exporters.quantization import quantized

_SEED = 20_24
FORCED_LENGTH = 25
"""Tokens of a sentence, source and target, where the model never ends by itself."""
_TEXTS = Path(__file__).resolve().parent.parent / "exporters" / "verification_texts"
COMPLETE = "complete"


@dataclass(frozen=True)
class CheckedModel:
    """A bundle with a float32 variant and a GPU variant, and what it translates.

    Attributes:
        name: for the tables.
        bundle: the model.
        sources: token ids, each with the final end-of-sentence.
        limits: most target tokens of each.
        forced: whether the model never ends by itself, so that every target is as long as its limit.
        ctranslate2: folder of the same weights for the other engine, or None.
    """

    name: str
    bundle: Bundle
    sources: Sequence[Sequence[int]]
    limits: Sequence[int]
    forced: bool
    ctranslate2: Path | None = None


def shipped_models(num_sentences: int | None = None) -> list[CheckedModel]:
    """The shipped bundles that have a GPU variant, on the texts their export was verified with."""
    models = []
    for folder in sorted(path for path in default_directory().iterdir() if path.is_dir()):
        bundle = open_bundle(folder)
        if "cuda-fp16" not in bundle.manifest.variants:
            continue
        manifest = bundle.manifest
        tokenizer = Tokenizer.open(bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)
        texts = (_TEXTS / f"{manifest.pairs[0].source}.txt").read_text(encoding="utf-8").splitlines()
        encoded = tokenizer.encode_sources([text for text in texts if text][:num_sentences])
        sources = [ids for ids in encoded if len(ids) <= manifest.limits.max_source_tokens]
        limits = [
            DecodingOptions().target_limit(
                len(ids),
                default_ratio=manifest.limits.max_target_ratio,
                model_limit=manifest.limits.max_target_tokens,
            )
            for ids in sources
        ]
        models.append(CheckedModel(manifest.id, bundle, sources, limits, forced=False))
    return models


def random_model(size: str, folder: Path, *, num_sentences: int) -> CheckedModel:
    """A random model, exported into `folder` unless that was done before.

    Args:
        size: "base", or "tiny" for what a CPU checks in seconds; also the model's folder within `folder`.
        folder: for exported models; one made elsewhere may be copied into it.
        num_sentences: random sentences of 25 tokens.

    Raises:
        ImportError: the model has yet to be exported, and PyTorch or onnx is not installed.
        BundleError: the model there is damaged, or something else lies in its place.
    """
    home = folder / size
    if not (home / COMPLETE).exists():
        _export(size, home)
    try:
        bundle = open_bundle(home / "bundle")
    except BundleError as error:
        raise BundleError(f"{error.message}; or remove {home}, and it is made anew") from error
    workload = forced(
        num_sentences,
        FORCED_LENGTH,
        vocabulary_size=bundle.manifest.sizes.vocabulary_size,
        eos_id=bundle.manifest.tokens.eos_id,
        seed=_SEED + 1,
    )
    peer = home / "ctranslate2"
    return CheckedModel(
        size,
        bundle,
        workload.sources,
        workload.limits,
        forced=True,
        ctranslate2=peer if peer.is_dir() else None,
    )


def random_weights(size: str) -> Checkpoint:
    """The weights of a random model, always the same.

    Raises:
        ImportError: PyTorch is not installed.
    """
    from benchmarks.random_model import BASE, random_checkpoint  # PyTorch, which serving does without

    tiny = dataclasses.replace(BASE, d_model=32, num_heads=4, encoder_layers=1, decoder_layers=2, ffn_size=64)
    return random_checkpoint(tiny if size == "tiny" else BASE, seed=_SEED)


def _export(size: str, home: Path) -> None:
    """Make the bundle, and the other engine's model where that engine is installed."""
    if home.exists():
        raise BundleError(f"{home} is no model that this command made; name another folder with --models")
    checkpoint = random_weights(size)
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{size}-", dir=home.parent) as folder:
        work = Path(folder) / size
        _write(checkpoint, work, size)
        work.rename(home)  # complete, or not at all


def _write(checkpoint: Checkpoint, work: Path, size: str) -> None:
    from exporters.export import ExportOptions, export_bundle

    work.mkdir()
    export_bundle(
        checkpoint,
        work / "bundle",
        ExportOptions(
            bundle_id=size,
            pairs=[LanguagePair(source="en", target="pt")],
            licence="MPL-2.0",
            model_card="Random weights, for the benchmark only.\n",
            verification_texts=["One, two, three.", "Four."],
            variants=("cpu-fp32", "cuda-fp16"),
            max_source_tokens=64,
            max_target_tokens=128,
        ),
    )
    if importlib.util.find_spec("ctranslate2") is not None:
        from benchmarks.peers.ctranslate2_model import write_ctranslate2_model

        write_ctranslate2_model(quantized(checkpoint), work / "ctranslate2", quantization=None)
    (work / COMPLETE).touch()
