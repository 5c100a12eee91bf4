"""A checkpoint written as a CTranslate2 model, through that engine's own specification classes.

Needs ``pip install ctranslate2`` (4.8 was used); nothing of the service does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import sentencepiece
from ctranslate2.specs import common_spec, transformer_spec

from exporters.checkpoint import Checkpoint, Float32Array, QuantizedWeight
from model.positions import position_codes

_ACTIVATIONS = {
    "relu": common_spec.Activation.RELU,
    "gelu": common_spec.Activation.GELU,
    "silu": common_spec.Activation.SWISH,
}
_NUM_POSITIONS = 512


def write_ctranslate2_model(checkpoint: Checkpoint, folder: Path, *, quantization: str | None) -> None:
    """Write the model, its vocabulary and, from the checkpoint's shortlist, its vmap.

    Args:
        checkpoint: post-norm, self-attention decoder, zero start embedding.
        folder: created.
        quantization: "int8", or None for float32.

    Raises:
        ValueError: the decoder has something else than plain self-attention, which that engine lacks.
    """
    config = checkpoint.config
    if config.decoder_cell != "attention" or config.num_query_heads != config.num_heads:
        raise ValueError(
            f"the decoder has {config.decoder_cell} with {config.num_query_heads} queries for "
            f"{config.num_heads} keys, which CTranslate2 does not compute; compare a model with plain "
            "self-attention"
        )
    spec = transformer_spec.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation=_ACTIVATIONS[config.activation],
    )
    codes = position_codes(_NUM_POSITIONS, config.d_model, layout=config.positions).numpy()
    for side in (spec.encoder, spec.decoder):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = _weight(checkpoint, "embedding.weight")
        side.position_encodings.encodings = codes
    spec.decoder.start_from_zero_embedding = config.start_id is None
    spec.decoder.projection.weight = _weight(checkpoint, "embedding.weight")
    spec.decoder.projection.bias = _weight(checkpoint, "output_bias")
    for index, layer in enumerate(spec.encoder.layer):
        _attention(checkpoint, layer.self_attention, f"encoder.{index}.self", fused=True)
        _feed_forward(checkpoint, layer.ffn, f"encoder.{index}.ffn")
    for index, layer in enumerate(spec.decoder.layer):
        _attention(checkpoint, layer.self_attention, f"decoder.{index}.self", fused=True)
        _attention(checkpoint, layer.attention, f"decoder.{index}.cross", fused=False)
        _feed_forward(checkpoint, layer.ffn, f"decoder.{index}.ffn")
    tokens = vocabulary(checkpoint)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.add_source_eos = True
    spec.config.bos_token = spec.config.eos_token = spec.config.decoder_start_token = tokens[config.eos_id]
    spec.config.unk_token = tokens[checkpoint.unknown_id]
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir(parents=True)
    spec.save(str(folder))
    if checkpoint.shortlist is not None:
        _write_vmap(checkpoint, folder / "vmap.txt", tokens)


def vocabulary(checkpoint: Checkpoint) -> list[str]:
    """The pieces of the checkpoint's SentencePiece model, by id."""
    return pieces_of(checkpoint.tokenizer)


def pieces_of(tokenizer: bytes) -> list[str]:
    """The pieces of a SentencePiece model, by id."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(tokenizer)
    return [processor.id_to_piece(index) for index in range(processor.get_piece_size())]


def open_translator(folder: Path, *, compute_type: str, num_threads: int) -> ctranslate2.Translator:
    """A translator with one thread per replica, as many replicas as threads."""
    return ctranslate2.Translator(
        str(folder), device="cpu", compute_type=compute_type, inter_threads=num_threads, intra_threads=1
    )


def _weight(checkpoint: Checkpoint, name: str) -> Float32Array:
    weight = checkpoint.weights[name]
    return weight.to_float() if isinstance(weight, QuantizedWeight) else weight


def _attention(checkpoint: Checkpoint, spec: Any, prefix: str, *, fused: bool) -> None:
    parts = [f"{prefix}_attention.{part}" for part in ("query", "key", "value")]
    groups = [parts] if fused else [parts[:1], parts[1:]]
    for linear, names in zip(spec.linear, [*groups, [f"{prefix}_attention.output"]], strict=True):
        linear.weight = np.concatenate([_weight(checkpoint, f"{name}.weight") for name in names])
        linear.bias = np.concatenate([_weight(checkpoint, f"{name}.bias") for name in names])
    _norm(checkpoint, spec.layer_norm, f"{prefix}_norm")


def _feed_forward(checkpoint: Checkpoint, spec: Any, prefix: str) -> None:
    for linear, name in ((spec.linear_0, f"{prefix}.inner"), (spec.linear_1, f"{prefix}.outer")):
        linear.weight = _weight(checkpoint, f"{name}.weight")
        linear.bias = _weight(checkpoint, f"{name}.bias")
    _norm(checkpoint, spec.layer_norm, f"{prefix}_norm")


def _norm(checkpoint: Checkpoint, spec: Any, name: str) -> None:
    spec.gamma = _weight(checkpoint, f"{name}.weight")
    spec.beta = _weight(checkpoint, f"{name}.bias")


def _write_vmap(checkpoint: Checkpoint, path: Path, tokens: list[str]) -> None:
    """One line per source piece; the line without a source is allowed everywhere."""
    shortlist = checkpoint.shortlist
    assert shortlist is not None
    with path.open("w", encoding="utf-8") as file:
        # Every source ends with end-of-sentence: what that allows is allowed everywhere too.
        eos_targets = shortlist.targets_of(checkpoint.config.eos_id).tolist()
        everywhere = sorted({*range(shortlist.num_frequent), *eos_targets})
        file.write("\t" + " ".join(tokens[target] for target in everywhere) + "\n")
        for source_id, piece in enumerate(tokens):
            targets = shortlist.targets_of(source_id)
            if len(targets):
                file.write(f"{piece}\t{' '.join(tokens[target] for target in targets)}\n")
