"""Tiny models that together make every choice the graphs of cuda-fp16 can meet, and their bundles."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import tiny_checkpoint, tiny_options, tiny_texts

from app.bundle import Bundle
from app.text import Tokenizer
from exporters.checkpoint import AlignmentHeads, Checkpoint, QuantizedWeight
from exporters.export import export_bundle

MODELS: dict[str, dict[str, Any]] = {
    "attention post relu": {"shortlist": True},
    "attention pre gelu": {"norm": "pre", "activation": "gelu", "start_id": 7, "num_heads": 2},
    "gated post relu": {"decoder_cell": "gated_attention", "decoder_query_heads": 8},
    "ssru post relu": {"decoder_cell": "ssru", "positions": "halves"},
    "ssru pre silu": {"decoder_cell": "ssru", "norm": "pre", "activation": "silu", "start_id": 5},
}
ALIGNMENTS = {"attention pre gelu": AlignmentHeads(layer=0, heads=(1,))}
ONE_EMBEDDING_SCALE = ("ssru post relu",)


def calm(checkpoint: Checkpoint) -> Checkpoint:
    """Layers that do not amplify, as trained ones; the tiny models' make a rounding grow fourfold in each."""
    weights = {
        name: value * np.float32(0.25) if value.ndim == 2 and not name.startswith("embedding") else value
        for name, value in checkpoint.weights.items()
        if isinstance(value, np.ndarray)
    }
    return dataclasses.replace(checkpoint, weights=weights)


def cuda_checkpoint(name: str) -> Checkpoint:
    checkpoint = calm(tiny_checkpoint(**MODELS[name]))
    if name in ONE_EMBEDDING_SCALE:
        table = checkpoint.weights["embedding.weight"]
        assert isinstance(table, np.ndarray)
        scale = np.float32(np.abs(table).max() / 64)
        stored = QuantizedWeight(np.rint(table / scale).astype(np.int8), np.array(scale))
        checkpoint = dataclasses.replace(
            checkpoint, weights={**checkpoint.weights, "embedding.weight": stored}
        )
    return dataclasses.replace(checkpoint, alignment=ALIGNMENTS.get(name, AlignmentHeads()))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda-models-")


@functools.cache
def cuda_bundle(name: str) -> Bundle:
    """The model with cpu-fp32 and cuda-fp16 graphs; made once for all tests."""
    torch.set_num_threads(1)
    options = dataclasses.replace(
        tiny_options(variants=("cpu-fp32", "cuda-fp16")), verification_texts=tiny_texts(4)
    )
    return export_bundle(cuda_checkpoint(name), Path(_folder().name) / name.replace(" ", "-"), options)


def sources_of(bundle: Bundle, num_texts: int) -> list[list[int]]:
    tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=bundle.manifest.tokens.eos_id)
    return tokenizer.encode_sources(list(tiny_texts(num_texts)))
