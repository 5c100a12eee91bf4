"""Activation scales found by watching a model translate."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import onnx
import sentencepiece
import torch
from tiny_models import tiny_checkpoint, tiny_options, tiny_texts

from exporters.calibration import calibrated
from exporters.checkpoint import Checkpoint, QuantizedWeight
from exporters.export import export_bundle


def sources_of(checkpoint: Checkpoint) -> list[list[int]]:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(io.BytesIO(checkpoint.tokenizer).read())
    return [[*processor.encode(text), checkpoint.config.eos_id] for text in tiny_texts()]


def matrices(checkpoint: Checkpoint) -> set[str]:
    return {
        name
        for name, weight in checkpoint.weights.items()
        if isinstance(weight, QuantizedWeight) or weight.ndim == 2
    }


def test_every_matrix_gets_a_scale_and_layers_that_share_an_input_the_same_one() -> None:
    torch.set_num_threads(1)
    checkpoint = tiny_checkpoint()
    scales = calibrated(checkpoint, sources_of(checkpoint)).activation_scales
    assert scales.keys() == matrices(checkpoint)
    assert all(scale > 0 for scale in scales.values())
    attention = "encoder.1.self_attention"
    assert len({scales[f"{attention}.{part}.weight"] for part in ("query", "key", "value")}) == 1
    memory = {
        scales[f"decoder.{i}.cross_attention.{part}.weight"] for i in (0, 1) for part in ("key", "value")
    }
    assert len(memory) == 1
    assert scales[f"{attention}.output.weight"] != scales[f"{attention}.query.weight"]


def test_a_larger_input_gets_a_larger_scale() -> None:
    checkpoint = tiny_checkpoint()
    name = "encoder.0.self_norm.weight"
    larger = dataclasses.replace(
        checkpoint, weights={**checkpoint.weights, name: np.asarray(checkpoint.weights[name]) * 10}
    )
    before, after = (calibrated(c, sources_of(c)).activation_scales for c in (checkpoint, larger))
    layer = "encoder.0.ffn.inner.weight"
    assert after[layer] > 5 * before[layer]


def test_a_calibrated_export_quantises_by_constants_alone(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    ready = calibrated(checkpoint, sources_of(checkpoint))
    kinds = {}
    for name, source in (("plain", checkpoint), ("calibrated", ready)):
        bundle = export_bundle(source, tmp_path / name, tiny_options())
        graph = onnx.load(str(bundle.path / "encoder.cpu-int8.onnx"), load_external_data=False).graph
        kinds[name] = {node.op_type for node in graph.node}
    assert "Abs" in kinds["plain"]
    assert "Abs" not in kinds["calibrated"]
