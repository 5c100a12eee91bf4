"""A student with self-attention that starts from a teacher with a recurrent decoder.

Everything the two have in common is copied. Each SSRU becomes a causal self-attention that does at once
roughly what the recurrence did: it takes a mean of the last few positions' candidates.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from app.errors import InvalidOption
from model.attention import CausalSelfAttention
from model.layers import DecoderLayer
from model.positions import position_codes
from model.ssru import SSRU
from model.transformer import Transformer

_DISTANCES = (0, 0, 0, 1, 1, 2, 2, 3)
"""How many positions back each of 8 heads looks; more heads repeat them."""
_SHARPNESS = 1.2
_NOISE = 0.1


def student_of(teacher: Transformer, *, dropout: float = 0.0) -> Transformer:
    """A Transformer with self-attention in the decoder and the teacher's weights wherever they fit.

    A teacher that has self-attention already is copied. The random part is drawn from torch's generator.

    Raises:
        InvalidOption: the teacher is pre-norm with SSRU, whose norms stand elsewhere than self-attention's.
    """
    config = replace(teacher.config, decoder_cell="attention", dropout=dropout)
    student = Transformer(config)
    copied = {
        name: tensor
        for name, tensor in teacher.state_dict().items()
        if name in student.state_dict() and ".cell." not in name
    }
    missing, _ = student.load_state_dict(copied, strict=False)
    if teacher.config.decoder_cell == "ssru":
        if config.norm != "post":
            raise InvalidOption("a pre-norm SSRU teacher has no counterpart; take from_teacher = false")
        for mine, theirs in zip(student.decoder, teacher.decoder, strict=True):
            assert isinstance(mine, DecoderLayer)
            assert isinstance(theirs, DecoderLayer)
            start_as_recurrence(mine.self_attention, theirs.cell, layout=config.positions)
    elif missing:
        raise InvalidOption(f"the teacher lacks {len(missing)} parameters, such as {missing[0]}")
    return student


@torch.no_grad()
def start_as_recurrence(attention: CausalSelfAttention, cell: SSRU, *, layout: str) -> None:
    """Set an attention's weights such that head h looks a fixed number of positions back.

    Values are the recurrence's candidates W x and the output projection is the identity. Queries and keys
    see the position code in the input: one pair of sine and cosine of frequency f, taken as it is by the key
    and turned by ``f * distance`` by the query, has the product ``cos(f (t - distance - s))``, which is
    largest at s = t - distance (Vaswani et al. 2017, section 3.5: a shift is a rotation). A little of the
    random initialisation stays, so that training can tell the heads' dimensions apart.

    Args:
        attention: of the student; changed in place.
        cell: of the teacher, as wide.
        layout: of the position codes.
    """
    d_model = cell.candidate.in_features
    num_heads = attention.num_heads
    head_size = d_model // num_heads
    num_waves = d_model // 2
    sines, cosines = _wave_places(num_waves, layout)
    frequencies = _frequencies(d_model, layout)
    attention.value.weight.copy_(cell.candidate.weight)
    nn.init.zeros_(attention.value.bias)
    nn.init.eye_(attention.output.weight)
    nn.init.zeros_(attention.output.bias)
    query, key = attention.query.weight, attention.key.weight
    query.mul_(_NOISE)
    key.mul_(_NOISE)
    waves_of_head = min(head_size // 2, num_waves)
    for head in range(num_heads):
        distance = _DISTANCES[head % len(_DISTANCES)]
        # Fast waves tell neighbours apart, slower ones which neighbourhood it is: heads take turns.
        first = waves_of_head if head % 2 and 2 * waves_of_head <= num_waves else 0
        for wave in range(waves_of_head):
            row = head * head_size + 2 * wave
            sine, cosine = int(sines[first + wave]), int(cosines[first + wave])
            angle = float(frequencies[first + wave]) * distance
            key[row, sine] += _SHARPNESS
            key[row + 1, cosine] += _SHARPNESS
            # sin(f (t - distance)) and cos(f (t - distance)), by the addition theorems.
            query[row, sine] += _SHARPNESS * math.cos(angle)
            query[row, cosine] -= _SHARPNESS * math.sin(angle)
            query[row + 1, cosine] += _SHARPNESS * math.cos(angle)
            query[row + 1, sine] += _SHARPNESS * math.sin(angle)


def _wave_places(num_waves: int, layout: str) -> tuple[Tensor, Tensor]:
    """Where the sine and the cosine of each wave stand in a position code."""
    waves = torch.arange(num_waves)
    if layout == "halves":
        return waves, num_waves + waves
    return 2 * waves, 2 * waves + 1


def _frequencies(d_model: int, layout: str) -> Tensor:
    """Radians per position of each wave, f32 [d/2], read off the code of position 1."""
    code = position_codes(2, d_model, layout="halves" if layout == "halves" else "interleaved")[1]
    sines, cosines = _wave_places(d_model // 2, layout)
    return torch.atan2(code[sines], code[cosines])
