"""The Transformer: Vaswani et al. 2017, "Attention Is All You Need", figure 1 and section 3.

Read on in `model.positions` (3.5), `model.attention` (3.2), `model.layers` (3.1 and 3.3) and
`model.ssru`, the recurrent cell that some decoders have in the place of self-attention.

Shapes: B segments, R rows (segments or hypotheses), S source and T target positions, P positions
already decoded, L decoder layers, H heads, D head size, d = H * D, V vocabulary. Masks are bool,
True where there is a real token, and each row needs at least one: an empty source gives NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.attention import KeysValues, padding_mask
from model.config import TransformerConfig
from model.layers import DecoderLayer, EncoderLayer, layer_norm
from model.positions import Positions


@dataclass(frozen=True)
class DecoderState:
    """What the decoder remembers of R rows that all stand at the same position.

    Attributes:
        layers: for each decoder layer, keys and values [R, H, P, D] of the positions before, or, for
            SSRU, one cell [R, d].
        position: P, the number of positions already decoded.
    """

    layers: tuple[tuple[Tensor, ...], ...]
    position: int

    def select(self, rows: Tensor) -> DecoderState:
        """Take rows, i64 [N], in this order; a row may be dropped or taken more than once."""
        layers = tuple(tuple(tensor.index_select(0, rows) for tensor in layer) for layer in self.layers)
        return DecoderState(layers, self.position)


class Transformer(nn.Module):
    """An encoder-decoder Transformer with one embedding for source, target and output (section 3.4)."""

    def __init__(self, config: TransformerConfig) -> None:
        """Make the parameters and initialise them; see `_initialise`."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.d_model)
        self.output_bias = nn.Parameter(torch.zeros(config.vocabulary_size))
        self.positions = Positions(config.d_model, layout=config.positions)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        if config.norm == "pre":
            self.encoder_norm: nn.Module = layer_norm(config)
            self.decoder_norm: nn.Module = layer_norm(config)
        else:
            self.encoder_norm = nn.Identity()
            self.decoder_norm = nn.Identity()
        self._initialise()

    def _initialise(self) -> None:
        """Draw the parameters.

        Linear weights are Xavier-uniform (Glorot and Bengio 2010) and biases zero. Embeddings are
        normal with deviation d^-0.5: times sqrt(d) they enter the layers with variance 1, and as
        the output projection they turn a normalised vector into logits of variance 1. LayerNorm
        starts as PyTorch makes it, scale 1 and bias 0.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=self.config.d_model**-0.5)
        nn.init.zeros_(self.output_bias)

    def forward(self, source_ids: Tensor, source_mask: Tensor, target_ids: Tensor) -> Tensor:
        """Predict every target token from the source and the target tokens before it.

        Args:
            source_ids: i64 [B, S], padded with any id.
            source_mask: bool [B, S].
            target_ids: i64 [B, T], T >= 1, padded with any id: causality hides what follows.

        Returns:
            Logits [B, T, V]; position t saw the start and ``target_ids[:, :t]``.
        """
        memory = self.encode(source_ids, source_mask)  # [B, S, d]
        cross = self.cross_keys_values(memory)  # L x [B, H, S, D]
        inputs = self.shift_right(target_ids)  # [B, T, d]
        state = self.initial_state(target_ids.shape[0])
        hidden, _ = self.decode(inputs, state, cross, source_mask)  # [B, T, d]
        return self.project(hidden)  # [B, T, V]

    def encode(self, source_ids: Tensor, source_mask: Tensor) -> Tensor:
        """Run the encoder over source_ids, i64 [B, S], with its mask, bool [B, S].

        Returns:
            The memory [B, S, d]; at padded positions it means nothing.
        """
        x = self.dropout(self._embed(source_ids) + self.positions(0, source_ids.shape[1]))  # [B, S, d]
        mask = padding_mask(source_mask)  # [B, 1, 1, S]
        for layer in self.encoder:
            x = layer(x, mask)  # [B, S, d]
        memory: Tensor = self.encoder_norm(x)  # [B, S, d]
        return memory

    def cross_keys_values(self, memory: Tensor) -> tuple[KeysValues, ...]:
        """Project the memory [B, S, d] once for each decoder layer, to keys and values [B, H, S, D]."""
        return tuple(layer.cross_attention.keys_values(memory) for layer in self._decoder_layers())

    def initial_state(self, num_rows: int) -> DecoderState:
        """The state of ``num_rows`` rows before the first position."""
        return DecoderState(tuple(layer.causal.start(num_rows) for layer in self._decoder_layers()), 0)

    def step(
        self, last_ids: Tensor | None, state: DecoderState, cross: tuple[KeysValues, ...], source_mask: Tensor
    ) -> tuple[Tensor, DecoderState]:
        """Predict the next token of R rows from the one before and the cache.

        Args:
            last_ids: the tokens just chosen, i64 [R]; None at position 0.
            state: from `initial_state` or the step before, perhaps after ``select``.
            cross: for each decoder layer, keys and values [R, H, S, D].
            source_mask: bool [R, S].

        Returns:
            Logits [R, V], and the state to continue from.

        Raises:
            ValueError: ``last_ids`` is None after position 0, or given there.
        """
        if (last_ids is None) != (state.position == 0):
            raise ValueError(
                f"last_ids is {'None' if last_ids is None else 'given'} at position {state.position};"
                " leave it out at position 0 and nowhere else"
            )
        if last_ids is None:
            inputs = self._start_embedding(source_mask.shape[0])  # [R, 1, d]
        else:
            inputs = self._embed(last_ids[:, None])  # [R, 1, d]
        hidden, state = self.decode(inputs, state, cross, source_mask)  # [R, 1, d]
        return self.project(hidden[:, 0]), state  # [R, V]

    def shift_right(self, target_ids: Tensor) -> Tensor:
        """Embed the decoder's inputs for a whole target: the start, then all tokens but the last.

        Args:
            target_ids: i64 [B, T].

        Returns:
            Word embeddings [B, T, d], still without positions.

        Raises:
            ValueError: T is 0.
        """
        if target_ids.shape[1] == 0:
            raise ValueError("target_ids has 0 positions; a target has at least 1, its end token")
        start = self._start_embedding(target_ids.shape[0])  # [B, 1, d]
        return torch.cat([start, self._embed(target_ids[:, :-1])], dim=1)  # [B, T, d]

    def decode(
        self, inputs: Tensor, state: DecoderState, cross: tuple[KeysValues, ...], source_mask: Tensor
    ) -> tuple[Tensor, DecoderState]:
        """Run the decoder over T positions that follow the state: all of a target, or one.

        Args:
            inputs: word embeddings [R, T, d] without positions.
            state: what was decoded before, at position P.
            cross: for each decoder layer, keys and values [R, H, S, D].
            source_mask: bool [R, S].

        Returns:
            What `project` expects, [R, T, d], and the state at position P + T.
        """
        num_positions = inputs.shape[1]
        x = self.dropout(inputs + self.positions(state.position, num_positions))  # [R, T, d]
        mask = padding_mask(source_mask)  # [R, 1, 1, S]
        caches = []
        for layer, past, attended in zip(self.decoder, state.layers, cross, strict=True):
            x, present = layer(x, past, attended, mask)  # [R, T, d]
            caches.append(present)
        return self.decoder_norm(x), DecoderState(tuple(caches), state.position + num_positions)

    def project(self, hidden: Tensor) -> Tensor:
        """Turn [..., d] into logits [..., V]: the embedding is the output projection (section 3.4)."""
        return functional.linear(hidden, self.embedding.weight, self.output_bias)

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Look up i64 [R, T] and multiply by sqrt(d) (section 3.4): [R, T, d]."""
        embedded: Tensor = self.embedding(token_ids) * math.sqrt(self.config.d_model)  # [R, T, d]
        return embedded

    def _start_embedding(self, num_rows: int) -> Tensor:
        """What the decoder sees at position 0, [R, 1, d]: the start token, or zeros as in Marian."""
        weight = self.embedding.weight
        if self.config.start_id is None:
            return weight.new_zeros(num_rows, 1, self.config.d_model)  # [R, 1, d]
        start_ids = torch.full((num_rows, 1), self.config.start_id, device=weight.device)  # [R, 1]
        return self._embed(start_ids)  # [R, 1, d]

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        """The decoder's layers by their own type, which nn.ModuleList forgets."""
        return (cast(DecoderLayer, layer) for layer in self.decoder)
