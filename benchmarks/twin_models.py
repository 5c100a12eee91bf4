"""The same weights for both sides: a bundle for our engine, two models for CTranslate2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from app.bundle import Bundle
from app.bundle.manifest import LanguagePair
from app.text import Tokenizer
from benchmarks.peers.ctranslate2_model import write_ctranslate2_model
from exporters.calibration import calibrated
from exporters.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle, without_unknown
from exporters.quantization import quantized

MAX_TARGET_TOKENS = 384


@dataclass(frozen=True)
class TwinModels:
    """One checkpoint as both sides read it.

    Attributes:
        checkpoint: the int8 weights that all of them compute with.
        bundle: ours.
        ctranslate2_float32: folder of the model whose tokens must be equal to ours.
        ctranslate2_int8: folder of the model that is timed.
    """

    checkpoint: Checkpoint
    bundle: Bundle
    ctranslate2_float32: Path
    ctranslate2_int8: Path

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer, opened anew."""
        manifest = self.bundle.manifest
        return Tokenizer.open(self.bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)


def export_twins(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    calibration: Sequence[Sequence[int]],
    verification_texts: Sequence[str],
) -> TwinModels:
    """Write a checkpoint for both sides.

    Args:
        checkpoint: float or int8 weights.
        folder: exists; the models are made inside.
        calibration: sources as token ids, on which our static activation scales are taken.
        verification_texts: texts that the export must translate as PyTorch does.
    """
    checkpoint = quantized(without_unknown(checkpoint))
    bundle = export_bundle(
        calibrated(checkpoint, calibration),
        folder / "bundle",
        ExportOptions(
            bundle_id="benchmark",
            pairs=[LanguagePair(source="en", target="pt")],
            licence="MPL-2.0",
            model_card="For the benchmark only.\n",
            verification_texts=verification_texts,
            max_target_tokens=MAX_TARGET_TOKENS,
        ),
    )
    float32, int8 = folder / "ct2-float32", folder / "ct2-int8"
    write_ctranslate2_model(checkpoint, float32, quantization=None)
    write_ctranslate2_model(checkpoint, int8, quantization="int8")
    return TwinModels(checkpoint, bundle, float32, int8)


def export_student(checkpoint: Checkpoint, folder: Path, calibration_texts: Sequence[str]) -> TwinModels:
    """Write a trained model for both sides; texts calibrate the scales, the first 20 verify the export."""
    tokenizer_file = folder / "tokenizer"
    tokenizer_file.write_bytes(checkpoint.tokenizer)
    tokenizer = Tokenizer.open(tokenizer_file, eos_id=checkpoint.config.eos_id)
    return export_twins(
        checkpoint,
        folder,
        calibration=tokenizer.encode_sources(list(calibration_texts)),
        verification_texts=calibration_texts[:20],
    )
