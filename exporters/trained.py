"""Between model folders, which training reads and writes, and the checkpoints that bundles are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
import torch

from app.bundle import Bundle, open_bundle
from app.decoding.shortlist import Shortlist
from app.errors import CheckpointError, InvalidOption
from app.text import Tokenizer
from exporters.bundle_checkpoint import read_checkpoint
from exporters.calibration import calibrated
from exporters.checkpoint import Checkpoint, QuantizedWeight, Weight
from exporters.export import without_unknown
from exporters.int8_grid import quantize_on_grid
from model.saved_model import SavedModel

LICENCE = "licence"
"""Key of a model folder's provenance: SPDX expression of the weights."""
FEW_TEXTS = 200
"""Fewer sentences than this leave activation scales to chance."""


def to_checkpoint(model: SavedModel, *, shortlist: Shortlist | None = None) -> Checkpoint:
    """The checkpoint of a trained model: matrices in int8, without loss where they are on a grid already.

    Args:
        model: a trained model.
        shortlist: for the model's vocabulary, or None.

    Raises:
        CheckpointError: weights that are not those of the configuration, or not finite.
        InvalidOption: the shortlist is for another vocabulary.
    """
    if shortlist is not None and shortlist.vocabulary_size != model.config.vocabulary_size:
        raise InvalidOption(
            f"the shortlist is for a vocabulary of {shortlist.vocabulary_size} tokens, the model has "
            f"{model.config.vocabulary_size}; make one with the model's own vocabulary"
        )
    weights: dict[str, Weight] = {}
    num_matrices = num_kept = 0
    for name, tensor in model.module().state_dict().items():
        values = tensor.numpy()
        if values.ndim != 2:
            weights[name] = values
            continue
        rounded = quantize_on_grid(values)
        num_matrices += 1
        num_kept += bool(np.array_equal(rounded.to_float(), values))
        weights[name] = rounded
    return Checkpoint(
        config=model.config,
        weights=weights,
        tokenizer=model.tokenizer,
        shortlist=shortlist,
        unknown_id=model.unknown_id,
        provenance={
            **model.provenance,
            "exporter": "trained",
            "matrices_already_int8": f"{num_kept} of {num_matrices}",
        },
    )


def with_activation_scales(
    checkpoint: Checkpoint,
    texts: Sequence[str],
    *,
    max_source_tokens: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Checkpoint:
    """The checkpoint with static activation scales, found by translating texts with it.

    Args:
        checkpoint: from `to_checkpoint`.
        texts: source sentences, one each; a few hundred like those that will be translated.
        max_source_tokens: longer sentences are left out.
        progress: told how many sentences are done.

    Raises:
        InvalidOption: no sentence is short enough.
    """
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(checkpoint.tokenizer)
    tokenizer = Tokenizer(processor, eos_id=checkpoint.config.eos_id)
    sources = [tokenizer.encode_source(text) for text in texts]
    fitting = [ids for ids in sources if len(ids) <= max_source_tokens]
    if not fitting:
        raise InvalidOption(
            f"none of the {len(sources)} sentences to calibrate with has at most {max_source_tokens} tokens; "
            "give shorter ones, one a line"
        )
    # Calibrated is what will be served: a model that never says the unknown piece.
    scales = calibrated(without_unknown(checkpoint), fitting, progress=progress).activation_scales
    provenance = {**checkpoint.provenance, "calibration_segments": str(len(fitting))}
    return dataclasses.replace(checkpoint, activation_scales=scales, provenance=provenance)


def to_saved_model(bundle: Bundle) -> SavedModel:
    """A bundle's weights in float32, to train on or to learn from; see `exporters.bundle_checkpoint`.

    Raises:
        CheckpointError: the bundle cannot be read back, or translates more than one direction.
    """
    manifest = bundle.manifest
    if len(manifest.pairs) != 1 or manifest.pairs[0].target_token_id is not None:
        raise CheckpointError(
            f"bundle {manifest.id} translates {len(manifest.pairs)} directions by their target tokens; a "
            "model folder states one direction, take a bundle of one"
        )
    checkpoint = read_checkpoint(bundle)
    return SavedModel(
        config=checkpoint.config,
        weights={
            name: torch.from_numpy(weight.to_float() if isinstance(weight, QuantizedWeight) else weight)
            for name, weight in checkpoint.weights.items()
        },
        tokenizer=checkpoint.tokenizer,
        source=manifest.pairs[0].source,
        target=manifest.pairs[0].target,
        unknown_id=checkpoint.unknown_id,
        provenance={**checkpoint.provenance, "weights_of_bundle": manifest.id, LICENCE: manifest.licence},
        max_source_tokens=manifest.limits.max_source_tokens,
        max_target_tokens=manifest.limits.max_target_tokens,
    )


def shortlist_for(model: SavedModel, *, file: Path | None, bundle: Path | None) -> Shortlist | None:
    """The shortlist of a file or of a bundle with the model's vocabulary; None if neither is given.

    Raises:
        InvalidOption: both are given, or the bundle has no shortlist or another vocabulary.
        BundleError: it cannot be opened.
    """
    if file is not None and bundle is not None:
        raise InvalidOption(
            "the shortlist comes from --shortlist or from --shortlist-of; give one of the two"
        )
    if bundle is None:
        return None if file is None else Shortlist.load(file)
    opened = open_bundle(bundle)
    manifest = opened.manifest
    if manifest.shortlist is None:
        raise InvalidOption(
            f"--shortlist-of: bundle {manifest.id} has none; make one with `dragoman export shortlist`"
        )
    if opened.file(manifest.tokenizer).read_bytes() != model.tokenizer:
        raise InvalidOption(
            f"--shortlist-of: bundle {manifest.id} has another vocabulary than the model, so its lists mean "
            "other tokens; make one with `dragoman export shortlist`"
        )
    return Shortlist.load(opened.file(manifest.shortlist))
