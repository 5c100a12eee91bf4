"""A checkpoint becomes a bundle: graphs and weights first, verification, the manifest last."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from app.bundle import MANIFEST_NAME, Bundle, Manifest, Variant, sha256_of
from app.bundle.manifest import (
    FileRecord,
    LanguagePair,
    Limits,
    ModelSizes,
    SpecialTokens,
    VariantGraphs,
)
from app.errors import BundleError
from exporters.checkpoint import Checkpoint
from exporters.cuda_graphs import copy_cross, copy_state, cuda_encoder
from exporters.cuda_step_graphs import cuda_decoder_step
from exporters.float16 import check_fits
from exporters.graphs import GraphContext, ModelContext, candidates, encoder
from exporters.int8_arithmetic import Int8Arithmetic
from exporters.linear import Arithmetic, Float32Arithmetic
from exporters.quantization import quantized
from exporters.step_graphs import StepKind, decoder_step, state_tensors, step_role
from exporters.verification import require_equal, require_similar, verify
from exporters.weight_store import WEIGHTS_NAME, WeightStore

TOKENIZER_NAME = "sentencepiece.model"
SHORTLIST_NAME = "shortlist.bin"
MODEL_CARD_NAME = "MODEL_CARD.md"
_NEVER_CHOSEN = np.float32(-1e9)
_ARITHMETIC: Mapping[Variant, Callable[[Checkpoint], Arithmetic]] = {
    "cpu-int8": Int8Arithmetic,
    "cpu-fp32": Float32Arithmetic,
}


@dataclass(frozen=True)
class ExportOptions:
    """What the bundle is to be.

    Attributes:
        bundle_id: unique name.
        pairs: directions the model translates.
        licence: SPDX expression of the weights.
        model_card: text of MODEL_CARD.md.
        variants: arithmetics to export; ``cpu-fp32`` is what verification holds exact.
        max_source_tokens: longer segments will be wrapped.
        max_target_tokens: positions of the decoder.
        max_target_ratio: default limit of target tokens per source token.
        verification_texts: source texts both sides translate at the end.
    """

    bundle_id: str
    pairs: Sequence[LanguagePair]
    licence: str
    model_card: str
    verification_texts: Sequence[str]
    variants: Sequence[Variant] = ("cpu-int8", "cpu-fp32")
    max_source_tokens: int = 128
    max_target_tokens: int = 384
    max_target_ratio: float = 2.5


def export_bundle(
    checkpoint: Checkpoint,
    destination: Path,
    options: ExportOptions,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Write a verified bundle.

    Everything is made in a folder beside `destination`, which appears complete or not at all.

    Args:
        checkpoint: what an importer or the trainer produced.
        destination: folder to create; must not exist or be an empty folder.
        options: names, limits, variants.
        progress: told what is being done.

    Raises:
        BundleError: the destination is taken, or the variants lack ``cpu-fp32``.
        CheckpointError: the weights are too large for float16, and ``cuda-fp16`` is wanted.
        VerificationFailed: the fp32 graphs do not reproduce the PyTorch model, or those in fp16 are far off.
    """
    if "cpu-fp32" not in options.variants:
        raise BundleError(
            f"the variants are {', '.join(options.variants) or 'none'}; cpu-fp32 must be one of them, since "
            "it is what verification holds exact (its graphs add less than 0.1 MB)"
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise BundleError(f"{destination} exists and is not empty; remove it or name another folder")
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        checkpoint = quantized(without_unknown(checkpoint))
        progress("building the graphs")
        variants = _write_graphs(checkpoint, work, options)
        (work / TOKENIZER_NAME).write_bytes(checkpoint.tokenizer)
        if checkpoint.shortlist is not None:
            checkpoint.shortlist.save(work / SHORTLIST_NAME)
        (work / MODEL_CARD_NAME).write_text(options.model_card, encoding="utf-8")
        manifest = _manifest(checkpoint, work, options, variants)
        bundle = Bundle(work, manifest)
        reports = []
        for variant in options.variants:
            report = verify(
                bundle, checkpoint, options.verification_texts, variant=variant, progress=progress
            )
            if variant == "cpu-fp32":
                require_equal(report)
            elif variant == "cuda-fp16":
                require_similar(report)
            reports.append(report)
        manifest = manifest.model_copy(update={"verification": tuple(reports)})
        write_manifest(work, manifest)
        work.chmod(0o755)
        if destination.exists():
            destination.rmdir()
        work.rename(destination)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return Bundle(destination, manifest)


def without_unknown(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a model that never chooses the unknown piece, which nobody can read."""
    bias = checkpoint.weights["output_bias"]
    if not isinstance(bias, np.ndarray):
        raise TypeError("output_bias is a matrix")
    bias = bias.copy()
    bias[checkpoint.unknown_id] = _NEVER_CHOSEN
    return dataclasses.replace(checkpoint, weights={**checkpoint.weights, "output_bias": bias})


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json in one step, so that a half-written one is never seen."""
    prepare_manifest(folder, manifest).replace(folder / MANIFEST_NAME)


def prepare_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest beside its place, ready to be renamed."""
    temporary = folder / f"{MANIFEST_NAME}.partial"
    temporary.write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return temporary


def _write_graphs(
    checkpoint: Checkpoint, folder: Path, options: ExportOptions
) -> dict[Variant, VariantGraphs]:
    context = ModelContext(
        checkpoint=checkpoint,
        store=WeightStore(),
        max_source_tokens=options.max_source_tokens,
        max_target_tokens=options.max_target_tokens,
    )
    variants: dict[Variant, VariantGraphs] = {}
    for variant in options.variants:
        graphs = _cuda_graphs(context) if variant == "cuda-fp16" else _cpu_graphs(context, variant)
        for role, graph in graphs.items():
            onnx.save_model(graph, str(folder / f"{role}.{variant}.onnx"))
        variants[variant] = VariantGraphs(**{role: f"{role}.{variant}.onnx" for role in graphs})
    context.store.write(folder / WEIGHTS_NAME)
    return variants


def _cpu_graphs(model: ModelContext, variant: Variant) -> dict[str, onnx.ModelProto]:
    """The graphs of a CPU variant by their roles, which are the fields of `VariantGraphs`."""
    context = GraphContext(
        checkpoint=model.checkpoint,
        store=model.store,
        max_source_tokens=model.max_source_tokens,
        max_target_tokens=model.max_target_tokens,
        arithmetic=_ARITHMETIC[variant](model.checkpoint),
    )
    has_shortlist = model.checkpoint.shortlist is not None
    graphs = {"encoder": encoder(context)}
    for shortlist in (False, True) if has_shortlist else (False,):
        for kind in StepKind:
            graphs[step_role(kind, shortlist=shortlist)] = decoder_step(context, kind, shortlist=shortlist)
    if has_shortlist:
        graphs["candidates"] = candidates(context)
    return graphs


def _cuda_graphs(context: ModelContext) -> dict[str, onnx.ModelProto]:
    """The graphs of cuda-fp16, likewise; none uses a shortlist, which would cost a GPU more than it saves."""
    check_fits(context.checkpoint)
    return {
        "encoder": cuda_encoder(context),
        **{step_role(kind, shortlist=False): cuda_decoder_step(context, kind) for kind in StepKind},
        "copy_state": copy_state(context),
        "copy_cross": copy_cross(context),
    }


def _manifest(
    checkpoint: Checkpoint, folder: Path, options: ExportOptions, variants: dict[Variant, VariantGraphs]
) -> Manifest:
    config = checkpoint.config
    return Manifest(
        format_version=1,
        id=options.bundle_id,
        pairs=tuple(options.pairs),
        sizes=ModelSizes(
            d_model=config.d_model,
            num_heads=config.num_heads,
            head_size=config.head_size,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            ffn_size=config.ffn_size,
            vocabulary_size=config.vocabulary_size,
        ),
        tokens=SpecialTokens(
            eos_id=config.eos_id, unknown_id=checkpoint.unknown_id, start_id=config.start_id
        ),
        limits=Limits(
            max_source_tokens=options.max_source_tokens,
            max_target_tokens=options.max_target_tokens,
            max_target_ratio=options.max_target_ratio,
        ),
        state=state_tensors(checkpoint),
        tokenizer=TOKENIZER_NAME,
        shortlist=SHORTLIST_NAME if checkpoint.shortlist is not None else None,
        variants=variants,
        licence=options.licence,
        provenance=dict(checkpoint.provenance),
        files={
            path.name: FileRecord(size_bytes=path.stat().st_size, sha256=sha256_of(path))
            for path in sorted(folder.iterdir())
        },
    )
