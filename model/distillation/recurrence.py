"""Self-attention that begins as the recurrence (SSRU) of a teacher's decoder layer.

What both have in common is a mean over the positions so far. The recurrence weighs them channel by channel,
``c_t = f_t c_{t-1} + (1 - f_t) W x_t``, where a forget gate f_t follows from the input. Attention weighs them
head by head, and its gate lets through channel by channel. So two heads look at the values of each channel,
which are the candidates W x: one at the position t itself, gated by 1 - f_t, and one at those before it,
gated by f_t; the output projection adds the two. Channels of similar gates share a head, since they look
about as far back (`start_as_recurrence`). Then each attention alone, between inputs and outputs of the
teacher's sub-layer, is fitted by gradients (`imitate_recurrences`): a step of that is cheap, since it goes
back through nothing else.

How far back a position lies must be read off the inputs. In the first layer these are word embeddings plus
position codes, and the embeddings are the larger part: a query and a key that take the codes' dimensions as
they are see the words, of which each is most like itself, and every head looks at its own position alone,
so sharply that no gradient ever moves it. Therefore the waves are read by the linear map of least squares,
which goes where the words vary little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import cast

import torch
from torch import Tensor, nn

from model.attention import CausalSelfAttention
from model.data.batches import Batch
from model.layers import DecoderLayer
from model.ssru import SSRU
from model.training.schedule import learning_rate_share
from model.transformer import Transformer

_SLOWEST, _FASTEST = 0.03, 0.9
"""Radians per position of the waves that positions are read as: periods of 209 to 7 positions."""
_FARTHEST = 2.0
"""Positions before t - 1 that a head looks at most at the start; gradients take it from there."""
_PEAK_BEFORE, _PEAK_OWN = 6.4, 12.0
"""The score of the position that a head looks at, if all waves could be read without error."""
_NOISE = 0.05
_RIDGE = 1e-3
_SAMPLE_TOKENS = 40_000
_SAMPLE_POSITIONS = 64
_KEPT_BYTES = 1 << 30
_JUDGED_BATCHES = 8
_WARMUP_STEPS = 50
_CLIP_NORM = 1.0


@dataclass(frozen=True)
class Sample:
    """What comes into one decoder layer of a teacher.

    Attributes:
        inputs: f32 [N, d].
        positions: f32 [N], of each input in its target.
    """

    inputs: Tensor
    positions: Tensor


@dataclass(frozen=True)
class LayerFit:
    """How near an attention comes to its recurrence, seen after the layer's norm.

    Attributes:
        error: mean squared difference per component.
        variance: of what is imitated, per component.
    """

    error: float
    variance: float

    @property
    def unexplained(self) -> float:
        """The share of the variance that is left; 0 where nothing varies."""
        return self.error / self.variance if self.variance else 0.0


@torch.no_grad()
def start_as_recurrence(attention: CausalSelfAttention, cell: SSRU, sample: Sample) -> None:
    """Set an attention's weights such that it does about what the recurrence does.

    Channels are sorted by their mean forget gate f and dealt out in this order to the keys and values. The
    recurrence weighs position t - 1 - k by f_t (1 - f) f^k, where k is f / (1 - f) on average: that is how
    far before t - 1 the first of a group's two heads looks, and f_t is its gate. The second looks
    at position t itself, and its gate is 1 - f_t.

    With waves of frequencies w, of which the key has ``(cos w s, sin w s)`` and the query the same turned by
    ``w n``, the product is ``cos(w (t - n - s))``, largest at s = t - n (Vaswani et al. 2017, section 3.5: a
    shift is a rotation). Both are read off the inputs by least squares. A little of the random
    initialisation stays, so that training can tell the heads' dimensions apart.

    Args:
        attention: of the student, as wide, gated, with two queries for each key; changed in place.
        cell: of the teacher.
        sample: of the layer's inputs.

    Raises:
        ValueError: the attention is of another form.
    """
    d_model, num_heads = cell.candidate.in_features, attention.num_heads
    if attention.gate is None or attention.group_size != 2:
        raise ValueError(
            f"an attention {'without' if attention.gate is None else 'with'} a gate and with "
            f"{attention.group_size} queries for a key cannot begin as a recurrence; that takes a gate and 2"
        )
    head_size = d_model // num_heads
    gates = torch.sigmoid(cell.forget(sample.inputs)).mean(dim=0)  # [d]
    channels = gates.argsort()  # [d]
    of_heads = channels.view(num_heads, head_size)
    twice = of_heads.repeat_interleave(2, dim=0).flatten()  # [2 d]: a group's two heads have its channels
    signs = torch.tensor([1.0, -1.0]).to(gates).repeat(num_heads).repeat_interleave(head_size)  # [2 d]
    attention.value.weight.copy_(cell.candidate.weight[channels])
    attention.gate.weight.copy_(signs[:, None] * cell.forget.weight[twice])  # 1 - sigmoid(a) = sigmoid(-a)
    attention.gate.bias.copy_(signs * cell.forget.bias[twice])
    attention.output.weight.zero_()
    attention.output.weight[twice, torch.arange(2 * d_model, device=twice.device)] = 1.0
    for projection in (attention.query, attention.key):
        projection.weight.mul_(_NOISE)
    for projection in (attention.query, attention.key, attention.value, attention.output):
        nn.init.zeros_(projection.bias)

    num_waves = head_size // 2
    if not num_waves:
        return  # nothing to read positions with
    frequencies = torch.logspace(math.log10(_SLOWEST), math.log10(_FASTEST), num_waves).to(gates)  # [waves]
    weight, bias = _reader(sample, frequencies)  # [waves, 2, d], [waves, 2]
    for head, gate in enumerate(gates[of_heads].mean(dim=1).tolist()):
        rows = slice(head * head_size, head * head_size + 2 * num_waves)
        attention.key.weight[rows] += weight.flatten(0, 1)
        attention.key.bias[rows] += bias.flatten()
        before = 1.0 + min(gate / max(1.0 - gate, _RIDGE), _FARTHEST)
        for query_head, distance, peak in ((2 * head, before, _PEAK_BEFORE), (2 * head + 1, 0.0, _PEAK_OWN)):
            # A product of head_size / 2 waves over sqrt(head_size) is to be the peak.
            turn = (
                peak * math.sqrt(head_size) / num_waves * _rotation(frequencies * distance)
            )  # [waves, 2, 2]
            rows = slice(query_head * head_size, query_head * head_size + 2 * num_waves)
            attention.query.weight[rows] += (turn @ weight).flatten(0, 1)
            attention.query.bias[rows] += (turn @ bias[:, :, None]).flatten()


def _reader(sample: Sample, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs to cos and sin of their positions' waves, linearly: weight [waves, 2, d], bias [waves, 2]."""
    angles = sample.positions[:, None] * frequencies  # [N, waves]
    waves = torch.stack([angles.cos(), angles.sin()], dim=2).flatten(1)  # [N, 2 * waves]
    mean, wave_mean = sample.inputs.mean(dim=0), waves.mean(dim=0)
    centred = sample.inputs - mean  # [N, d]
    covariance = centred.T @ centred / len(centred)  # [d, d]
    ridge = _RIDGE * (covariance.diagonal().mean() + _RIDGE) * torch.eye(len(covariance)).to(covariance)
    correlation = centred.T @ (waves - wave_mean) / len(centred)  # [d, 2 * waves]
    weight = torch.linalg.solve(covariance + ridge, correlation).T  # [2 * waves, d]
    bias = wave_mean - weight @ mean
    return weight.reshape(len(frequencies), 2, -1), bias.reshape(len(frequencies), 2)


def _rotation(angles: Tensor) -> Tensor:
    """What turns (cos a, sin a) into (cos(a - angle), sin(a - angle)): [waves, 2, 2]."""
    cosines, sines = angles.cos(), angles.sin()
    return torch.stack([torch.stack([cosines, sines], 1), torch.stack([-sines, cosines], 1)], 1)


def imitate_recurrences(
    student: Transformer,
    teacher: Transformer,
    batches: Iterator[Batch],
    *,
    steps: int,
    learning_rate: float = 3e-3,
    on_step: Callable[[int, Sequence[LayerFit]], None] = lambda *_: None,
) -> tuple[LayerFit, ...]:
    """Make the decoder self-attentions of a student that is otherwise its teacher's copy.

    What comes into the teacher's layers takes longer to compute than a step does, so it is kept: after some
    batches the same ones come again.

    Args:
        student: from `model.distillation.initialisation.student_of`; its self-attentions and their norms are
            changed in place.
        teacher: with SSRU and post-norm, on the same device.
        batches: endless.
        steps: of AdamW after the start, each with one batch for all layers; 0 leaves it at the start.
        learning_rate: the peak; it rises over some steps and falls linearly to 0.
        on_step: told after each step its number, from 1, and how near the layers came on its batch.

    Returns:
        How near the layers come on batches that they did not learn from.
    """
    layers = [
        _Layer(cast(DecoderLayer, mine), cast(DecoderLayer, theirs))
        for mine, theirs in zip(student.decoder, teacher.decoder, strict=True)
    ]
    for layer, sample in zip(layers, _samples(teacher, batches), strict=True):
        start_as_recurrence(layer.mine.self_attention, layer.theirs.cell, sample)
    parameters = [
        [*layer.mine.self_attention.parameters(), *layer.mine.self_norm.parameters()] for layer in layers
    ]
    adamw = torch.optim.AdamW(
        [{"params": group} for group in parameters], betas=(0.9, 0.98), weight_decay=0.0
    )
    mode = student.training
    student.eval()  # dropout would hide how near it comes
    for step, lesson in enumerate(islice(_lessons(layers, teacher, batches), steps), start=1):
        rate = learning_rate * learning_rate_share(
            # One more than there are, so that the last still learns.
            step,
            schedule="linear",
            warmup_steps=min(_WARMUP_STEPS, steps // 4),
            max_steps=steps + 1,
        )
        fits = []
        for layer, (inputs, wanted) in zip(layers, lesson.layers, strict=True):
            error = layer.error(inputs, wanted, lesson.mask)
            error.backward()  # type: ignore[no-untyped-call]
            variance = float(wanted.var(dim=0, unbiased=False).mean())
            fits.append(LayerFit(float(error.detach()), variance))
        for group, learnt in zip(adamw.param_groups, parameters, strict=True):
            group["lr"] = rate
            nn.utils.clip_grad_norm_(learnt, _CLIP_NORM)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        on_step(step, fits)
    judged = _judged(layers, teacher, islice(batches, _JUDGED_BATCHES))
    student.train(mode)
    return judged


@torch.no_grad()
def _judged(layers: Sequence[_Layer], teacher: Transformer, batches: Iterator[Batch]) -> tuple[LayerFit, ...]:
    """The mean over some batches."""
    sums = [[0.0, 0.0] for _ in layers]
    num_batches = 0
    for batch in batches:
        num_batches += 1
        lesson = _lesson(layers, teacher, batch)
        for total, layer, (inputs, wanted) in zip(sums, layers, lesson.layers, strict=True):
            total[0] += float(layer.error(inputs, wanted, lesson.mask))
            total[1] += float(wanted.var(dim=0, unbiased=False).mean())
    return tuple(LayerFit(error / num_batches, variance / num_batches) for error, variance in sums)


@dataclass(frozen=True)
class _Lesson:
    """What the layers shall do with one batch.

    Attributes:
        mask: bool [B, T], True at real tokens.
        layers: for each layer its inputs [B, T, d], and what the teacher's first sub-layer and norm make of
            the real ones, [tokens, d].
    """

    mask: Tensor
    layers: tuple[tuple[Tensor, Tensor], ...]

    @property
    def num_bytes(self) -> int:
        """Of the layers' tensors."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)


def _lessons(layers: Sequence[_Layer], teacher: Transformer, batches: Iterator[Batch]) -> Iterator[_Lesson]:
    """Of all batches, until so many are kept as the memory is meant to hold; then those again, endless."""
    kept: list[_Lesson] = []
    while sum(lesson.num_bytes for lesson in kept) < _KEPT_BYTES:
        kept.append(_lesson(layers, teacher, next(batches)))
        yield kept[-1]
    yield from cycle(kept)


@torch.no_grad()
def _lesson(layers: Sequence[_Layer], teacher: Transformer, batch: Batch) -> _Lesson:
    inputs = _layer_inputs(teacher, batch)
    wanted = [
        _after_norm(layer.theirs, each)[batch.target_mask] for layer, each in zip(layers, inputs, strict=True)
    ]
    return _Lesson(batch.target_mask, tuple(zip(inputs, wanted, strict=True)))


@dataclass(frozen=True)
class _Layer:
    """A layer of the student and the teacher's."""

    mine: DecoderLayer
    theirs: DecoderLayer

    def error(self, inputs: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
        """Mean squared difference, with its gradient, of the student's sub-layer from what is wanted.

        Args:
            inputs: [B, T, d].
            wanted: [tokens, d].
            mask: bool [B, T], True at real tokens.
        """
        return (_after_norm(self.mine, inputs)[mask] - wanted).square().mean()


def _after_norm(layer: DecoderLayer, inputs: Tensor) -> Tensor:
    """What a post-norm layer's first sub-layer makes of a whole target: [B, T, d] -> [B, T, d]."""
    outputs, _ = layer.causal.advance(inputs, layer.causal.start(len(inputs)))
    return layer.leave(inputs, outputs, layer.self_norm)


@torch.no_grad()
def _layer_inputs(teacher: Transformer, batch: Batch) -> list[Tensor]:
    """What comes into each decoder layer of a teacher-forced pass, each [B, T, d]."""
    inputs: list[Tensor] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for layer in teacher.decoder
    ]
    try:
        cross = teacher.cross_keys_values(teacher.encode(batch.source_ids, batch.source_mask))
        state = teacher.initial_state(len(batch.target_ids))
        teacher.decode(teacher.shift_right(batch.target_ids), state, cross, batch.source_mask)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _samples(teacher: Transformer, batches: Iterator[Batch]) -> list[Sample]:
    """Some inputs of each decoder layer, from the beginning of targets."""
    inputs: list[list[Tensor]] = [[] for _ in teacher.decoder]
    positions: list[Tensor] = []
    while sum(map(len, positions)) < _SAMPLE_TOKENS:
        batch = next(batches)
        mask = batch.target_mask.clone()  # [B, T]
        mask[:, _SAMPLE_POSITIONS:] = False
        places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)  # [B, T]
        positions.append(places[mask].float())
        for gathered, of_layer in zip(inputs, _layer_inputs(teacher, batch), strict=True):
            gathered.append(of_layer[mask].float())
    return [Sample(torch.cat(gathered), torch.cat(positions)) for gathered in inputs]
