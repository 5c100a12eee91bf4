"""One model whose weights are the mean of several runs' (Wortsman et al. 2022, "model soups")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from app.errors import InvalidOption
from model.saved_model import SavedModel

_TRAINING = "training"


def mean_model(models: Sequence[SavedModel]) -> SavedModel:
    """The mean of models of one shape and vocabulary, tensor by tensor, summed in float64.

    It is a sensible model where the runs share their beginning, as one that goes on from another does. What
    is equal in all of them stays as it is, to the bit.

    Args:
        models: two or more; everything but weights and the account of the training is the first one's.

    Raises:
        InvalidOption: there are fewer, or one differs in shape, vocabulary, languages or licence.
    """
    if len(models) < 2:
        raise InvalidOption(f"models given: {len(models)}; a mean needs at least 2")
    first, *others = models
    for number, other in enumerate(others, 2):
        for what, is_other in {
            # Dropout is of the training alone, and a bundle's weights do not know it.
            "shape": replace(other.config, dropout=first.config.dropout) != first.config,
            "vocabulary": other.tokenizer != first.tokenizer or other.unknown_id != first.unknown_id,
            "pair of languages": (other.source, other.target) != (first.source, first.target),
            "licence": other.provenance.get("licence") != first.provenance.get("licence"),
        }.items():
            if is_other:
                raise InvalidOption(
                    f"model {number} has another {what} than the first one; average runs that went on from "
                    "one another, or from the same model"
                )
    weights = {}
    for name, tensor in first.weights.items():
        total = torch.stack([model.weights[name].double() for model in models]).sum(dim=0)
        weights[name] = (total / len(models)).to(tensor.dtype)
    accounts = [f"({model.provenance.get(_TRAINING, 'not stated')})" for model in models]
    provenance = {**first.provenance, _TRAINING: f"mean of {len(models)} models: " + ", ".join(accounts)}
    return replace(first, weights=weights, provenance=provenance)
