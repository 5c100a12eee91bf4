"""A Transformer of the base size with random weights that never ends a sentence: speed without training.

What it says means nothing; how long it takes is what a trained model of this size takes, and since no
sentence ends by itself, both engines make exactly the same number of tokens.
"""

from __future__ import annotations

import math

import numpy as np

from app.bundle import default_directory, open_bundle
from exporters.checkpoint import Checkpoint, Float32Array
from model.config import TransformerConfig
from model.transformer import Transformer

BASE = TransformerConfig(
    vocabulary_size=32000,
    d_model=512,
    num_heads=8,
    encoder_layers=6,
    decoder_layers=6,
    ffn_size=2048,
    positions="halves",
    eos_id=0,
    start_id=None,
)
"""The base model of Vaswani et al. 2017, table 3, with a vocabulary of 32,000."""
_NEVER = -1e9


def random_checkpoint(config: TransformerConfig, *, seed: int) -> Checkpoint:
    """A checkpoint with the shipped EN-PT vocabulary, without a shortlist, that never chooses to end.

    Args:
        config: its vocabulary has as many pieces as the shipped one.
        seed: of the weights.
    """
    draw = np.random.default_rng(seed)
    weights = {
        name: _draw(draw, name, tuple(tensor.shape))
        for name, tensor in Transformer(config).state_dict().items()
    }
    weights["output_bias"][config.eos_id] = _NEVER
    bundle = open_bundle(default_directory() / "en-pt")
    return Checkpoint(
        config=config,
        weights=weights,
        tokenizer=bundle.file(bundle.manifest.tokenizer).read_bytes(),
        provenance={"origin": f"random weights, seed {seed}"},
    )


def _draw(draw: np.random.Generator, name: str, shape: tuple[int, ...]) -> Float32Array:
    if name.endswith("norm.weight"):
        return np.ones(shape, dtype=np.float32)
    if len(shape) == 1:
        return np.zeros(shape, dtype=np.float32)
    # Unit variance through every matrix; the embedding is multiplied by sqrt(d) when it is read.
    return (draw.standard_normal(shape) / math.sqrt(shape[1])).astype(np.float32)
