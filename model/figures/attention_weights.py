"""What a trained model looks at: the attention weights of one sentence, taken from outside the model.

The model's attention does not return its weights. A forward hook sees what went into each
`MultiHeadAttention` and what came out, computes the weights again with the module's own projections, and a
test holds them against the output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from app.text import Tokenizer
from model.attention import KeysValues, MultiHeadAttention
from model.greedy import greedy
from model.transformer import Transformer

_START = "(start)"
_MAX_TARGET_FACTOR = 3
_MORE_STEPS = 8


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """All attention weights of one sentence and its translation.

    Attributes:
        source_pieces: S pieces, the end token last.
        target_pieces: T pieces that were chosen, the end token last if it was chosen.
        input_pieces: T pieces that the decoder read: the start, then all chosen ones but the last.
        encoder: float32 [L, H, S, S]; each row sums to 1 over the last dimension.
        cross: float32 [L, H, T, S]; row t is the step that chose ``target_pieces[t]``.
        decoder: float32 [L, H, T, T], or None where the decoder's layers are recurrent (SSRU) and have none.
        ended: whether the end token was chosen; if not, the limit of steps cut the translation.
    """

    source_pieces: tuple[str, ...]
    target_pieces: tuple[str, ...]
    input_pieces: tuple[str, ...]
    encoder: Tensor
    cross: Tensor
    decoder: Tensor | None
    ended: bool


def attention_weights(
    module: MultiHeadAttention, inputs: Tensor, attended: KeysValues, mask: Tensor
) -> Tensor:
    """The softmax that `MultiHeadAttention` computes on its way and does not return.

    Args:
        module: whose query projection and number of heads are taken.
        inputs: [B, T, d].
        attended: keys and values, [B, H, S, D] each.
        mask: bool, broadcasts to [B, H, T, S].

    Returns:
        [B, G*H, T, S], G queries for each key.
    """
    queries = module.queries(inputs)  # [B, G*H, T, D]
    keys = module.for_every_query(attended).keys  # [B, G*H, S, D]
    scores = queries @ keys.transpose(2, 3) / math.sqrt(queries.shape[3])  # [B, G*H, T, S]
    weights: Tensor = scores.masked_fill(~mask, -math.inf).softmax(dim=3)  # [B, G*H, T, S]
    return weights


@contextmanager
def recorded_weights(model: Transformer) -> Iterator[dict[str, Tensor]]:
    """Note the weights of every attention that runs meanwhile, by the module's name, [B, H, T, S]."""
    found: dict[str, Tensor] = {}
    handles = []

    def recorder(name: str) -> Any:
        def record(module: nn.Module, arguments: tuple[Any, ...], _output: Tensor) -> None:
            found[name] = attention_weights(cast(MultiHeadAttention, module), *arguments)

        return record

    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            handles.append(module.register_forward_hook(recorder(name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def attention_of(model: Transformer, tokenizer: Tokenizer, text: str) -> AttentionMaps:
    """Translate a sentence greedily, then read it and its translation once more and note the attention.

    Args:
        model: in eval mode.
        tokenizer: of source and target.
        text: one sentence that has passed ``check_text``. The decoding stops after 3 S + 8 steps.
    """
    source_ids = torch.tensor([tokenizer.encode_source(text)])  # [1, S]
    source_mask = torch.ones_like(source_ids, dtype=torch.bool)  # [1, S]
    max_steps = _MAX_TARGET_FACTOR * source_ids.shape[1] + _MORE_STEPS
    result = greedy(model, source_ids, source_mask, max_steps=max_steps)[0]
    target = [*result.token_ids, *([model.config.eos_id] if result.ended else [])]
    with recorded_weights(model) as found:
        model(source_ids, source_mask, torch.tensor([target]))

    def stacked(stack: str, sub_layer: str, num_layers: int) -> Tensor:
        return torch.stack([found[f"{stack}.{layer}.{sub_layer}"][0] for layer in range(num_layers)])

    config = model.config
    target_pieces = tokenizer.pieces(target)
    return AttentionMaps(
        source_pieces=tuple(tokenizer.pieces(source_ids[0].tolist())),
        target_pieces=tuple(target_pieces),
        input_pieces=(_START, *target_pieces[:-1]),
        encoder=stacked("encoder", "self_attention", config.encoder_layers),
        cross=stacked("decoder", "cross_attention", config.decoder_layers),
        decoder=(
            stacked("decoder", "self_attention", config.decoder_layers)
            if config.decoder_cell != "ssru"
            else None
        ),
        ended=result.ended,
    )
