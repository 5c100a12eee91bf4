"""An EN-PT Transformer student with a self-attention decoder, kept outside the repository, as a `Checkpoint`.

It stands in for models of our own in the comparison with other engines: a standard post-norm Transformer
(6+2 layers, d 256, 8 heads, FFN 1536) in one .npz of float16 arrays; vocabulary and shortlist are those of
the shipped EN-PT bundle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from app.bundle import default_directory, open_bundle
from app.decoding.shortlist import Shortlist
from exporters.checkpoint import Checkpoint, Float32Array
from model.config import TransformerConfig

_ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "output"}
_FEED_FORWARD = {"l1": "inner", "l2": "outer"}
_BLOCKS = {
    "enc_att": ("encoder", "self_attention", "self_norm", _ATTENTION),
    "enc_ffn": ("encoder", "ffn", "ffn_norm", _FEED_FORWARD),
    "self": ("decoder", "self_attention", "self_norm", _ATTENTION),
    "ctx": ("decoder", "cross_attention", "cross_norm", _ATTENTION),
    "dff": ("decoder", "ffn", "ffn_norm", _FEED_FORWARD),
}


def read_student(path: Path) -> Checkpoint:
    """Read the .npz; vocabulary and shortlist come from the shipped EN-PT bundle."""
    weights: dict[str, Float32Array] = {}
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays.files:
            weights[_our_name(name)] = arrays[name].astype(np.float32)
    bundle = open_bundle(default_directory() / "en-pt")
    config = TransformerConfig(
        vocabulary_size=len(weights["embedding.weight"]),
        d_model=256,
        num_heads=8,
        encoder_layers=6,
        decoder_layers=2,
        ffn_size=1536,
        positions="halves",
        layer_norm_epsilon=1e-6,
        eos_id=0,
        start_id=None,
    )
    return Checkpoint(
        config=config,
        weights=weights,
        tokenizer=bundle.file(bundle.manifest.tokenizer).read_bytes(),
        shortlist=Shortlist.load(bundle.file(str(bundle.manifest.shortlist))),
        provenance={"origin": path.name},
    )


def _our_name(name: str) -> str:
    if name in ("emb", "ob"):
        return {"emb": "embedding.weight", "ob": "output_bias"}[name]
    block, layer, part, kind = name.split(".")
    side, sublayer, norm, parts = _BLOCKS[block]
    if part == "ln":
        return f"{side}.{layer}.{norm}.{ {'w': 'weight', 'b': 'bias'}[kind] }"
    return f"{side}.{layer}.{sublayer}.{parts[part]}.{kind}"
