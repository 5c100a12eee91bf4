"""The PyTorch model of a checkpoint: what exported graphs are compared with."""

from __future__ import annotations

import numpy as np
import torch

from exporters.checkpoint import Checkpoint, QuantizedWeight
from model.transformer import Transformer


def to_module(checkpoint: Checkpoint) -> Transformer:
    """The checkpoint as a `Transformer` in eval mode, int8 weights multiplied out in float32."""
    module = Transformer(checkpoint.config)
    state = {
        name: torch.from_numpy(
            weight.to_float() if isinstance(weight, QuantizedWeight) else np.ascontiguousarray(weight)
        )
        for name, weight in checkpoint.weights.items()
    }
    module.load_state_dict(state, strict=True)
    return module.eval()
