"""Word-level distillation: the student's probabilities and hidden states against the teacher's.

Hinton et al. 2015 for the divergence, Kim and Rush 2016 for distilling translation by word, with the
teacher's own translations as targets (their sequence level). To match hidden states as well makes the
first steps much shorter, since the student starts as a near copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.errors import InvalidOption
from model.attention import KeysValues
from model.data.batches import Batch
from model.distillation.sampled_vocabulary import IdArray, SampledVocabulary
from model.training.objective import Loss
from model.transformer import Transformer


@dataclass(frozen=True)
class LossWeights:
    """How much each part of the loss counts.

    Attributes:
        divergence: KL(teacher || student).
        token: cross-entropy of the target's token.
        hidden: mean squared difference of hidden states.
    """

    divergence: float
    token: float
    hidden: float


class Distillation:
    """The loss of a student beside its teacher, for `model.training.trainer`.

    Raises:
        InvalidOption: the two differ in width, depth, vocabulary or the place of their norms.
    """

    def __init__(
        self,
        teacher: Transformer,
        student: Transformer,
        vocabulary: SampledVocabulary,
        *,
        weights_of_source: Sequence[LossWeights],
        keeps: bool = False,
    ) -> None:
        """Freeze the teacher, and find out whether the two share an encoder.

        Args:
            teacher: on the student's device.
            student: whose parameters' ``requires_grad`` is settled.
            vocabulary: what the probabilities run over.
            weights_of_source: the weights for the pairs of each source of the batches, by `Batch.origins`.
            keeps: keep what the teacher makes of the batches of a chunk until those of another come.
        """
        mine, theirs = student.config, teacher.config
        for name in ("d_model", "decoder_layers", "vocabulary_size", "norm"):
            if getattr(mine, name) != getattr(theirs, name):
                raise InvalidOption(
                    f"the teacher's {name} is {getattr(theirs, name)} and the student's is "
                    f"{getattr(mine, name)}; states and words are compared one by one; take another "
                    "teacher, or the same size in [model]"
                )
        self._teacher = teacher.eval().requires_grad_(False)
        self._vocabulary = vocabulary
        self._weights = torch.tensor(
            [[weights.divergence, weights.token, weights.hidden] for weights in weights_of_source],
            device=student.output_bias.device,
        )
        self._keeps = keeps
        self._lessons: dict[tuple[int, int], _Lesson] = {}
        self._shares_encoder = _same_frozen_encoder(teacher, student)

    def __call__(self, model: Transformer, batch: Batch, *, step: int) -> Loss:
        """Sum over real target tokens; the parts are the three unweighted sums."""
        with torch.no_grad():
            lesson = self._lesson(batch)
            memory, theirs = lesson.memory, lesson.decoding
            ids = self._ids(batch, lesson, step=step)  # [N]
            teacher_log_probs = theirs.log_probs(self._teacher, ids)  # [tokens, N]
        places = torch.searchsorted(ids, batch.target_ids[batch.target_mask])  # [tokens]
        if not self._shares_encoder:
            memory = model.encode(batch.source_ids, batch.source_mask)  # [B, S, d]
        mine = _Decoding.run(model, memory, batch)
        log_probs = mine.log_probs(model, ids)  # [tokens, N]

        divergence = (teacher_log_probs.exp() * (teacher_log_probs - log_probs)).sum(dim=1)  # [tokens]
        token = -log_probs.gather(1, places[:, None])[:, 0]  # [tokens]
        hidden = sum(
            (ours.float() - other.float()).square().mean(dim=1)
            for ours, other in zip(mine.hidden, theirs.hidden, strict=True)
        )
        assert isinstance(hidden, Tensor)  # [tokens]
        num_positions = batch.target_ids.shape[1]
        origins = batch.origins[:, None].expand(-1, num_positions)[batch.target_mask]  # [tokens]
        parts = torch.stack([divergence, token, hidden], dim=1)  # [tokens, 3]
        total = (parts * self._weights[origins]).sum()
        sums = parts.detach().sum(dim=0).tolist()
        return Loss(
            total, len(places), dict(zip(("divergence", "cross_entropy", "hidden"), sums, strict=True))
        )

    def _lesson(self, batch: Batch) -> _Lesson:
        """What the teacher makes of a batch, which is kept while batches of its chunk may come again."""
        if not self._keeps or batch.place is None:
            return self._new_lesson(batch)
        if any(chunk != batch.place[0] for chunk, _ in self._lessons):
            self._lessons.clear()
        if batch.place not in self._lessons:
            self._lessons[batch.place] = self._new_lesson(batch)
        return self._lessons[batch.place]

    def _new_lesson(self, batch: Batch) -> _Lesson:
        memory = self._teacher.encode(batch.source_ids, batch.source_mask)  # [B, S, d]
        decoding = _Decoding.run(self._teacher, memory, batch)
        offered = self._vocabulary.offered(batch)  # [N]
        ids = torch.from_numpy(offered).to(batch.target_ids.device)
        return _Lesson(
            memory, decoding, offered, decoding.best(self._teacher, ids, self._vocabulary.num_best)
        )

    def _ids(self, batch: Batch, lesson: _Lesson, *, step: int) -> Tensor:
        """The tokens that this batch's probabilities run over, sorted, i64 [N] on the batch's device."""
        ids = self._vocabulary.ids(batch, step=step, offered=lesson.offered, best=lesson.best.cpu().numpy())
        return torch.from_numpy(ids).to(batch.target_ids.device)


@dataclass(frozen=True)
class _Decoding:
    """A teacher-forced pass, at real target tokens only.

    Attributes:
        hidden: what each layer's first norm leaves behind and, last, what is projected; each [tokens, d].
    """

    hidden: tuple[Tensor, ...]

    @classmethod
    def run(cls, model: Transformer, memory: Tensor, batch: Batch) -> _Decoding:
        caught: list[Tensor] = []
        handles = [
            layer.self_norm.register_forward_hook(lambda _, __, output: caught.append(output))
            for layer in model.decoder
            if isinstance(layer.self_norm, nn.Module)
        ]
        try:
            cross: tuple[KeysValues, ...] = model.cross_keys_values(memory)
            inputs = model.shift_right(batch.target_ids)  # [B, T, d]
            state = model.initial_state(inputs.shape[0])
            final, _ = model.decode(inputs, state, cross, batch.source_mask)  # [B, T, d]
        finally:
            for handle in handles:
                handle.remove()
        return cls(tuple(each[batch.target_mask] for each in (*caught, final)))

    def log_probs(self, model: Transformer, ids: Tensor) -> Tensor:
        """Log-probabilities over some ids, i64 [N]: f32 [tokens, N]."""
        return functional.log_softmax(self._logits(model, ids), dim=1)

    def best(self, model: Transformer, ids: Tensor, number: int) -> Tensor:
        """Those of some ids that are among the `number` likeliest of any position, i64."""
        number = min(number, len(ids))
        if not number:
            return ids[:0]
        places = self._logits(model, ids).topk(number, dim=1, sorted=False).indices  # [tokens, number]
        return ids[places.unique()]  # type: ignore[no-untyped-call]

    def _logits(self, model: Transformer, ids: Tensor) -> Tensor:
        """Over some ids, i64 [N]: f32 [tokens, N]."""
        weight, bias = model.embedding.weight[ids], model.output_bias[ids]
        return functional.linear(self.hidden[-1], weight, bias).float()


@dataclass(frozen=True)
class _Lesson:
    """What follows from a batch and its teacher alone.

    Attributes:
        memory: the encoded sources, [B, S, d].
        decoding: the teacher's.
        offered: what the shortlist offers, i64 [N].
        best: those of them that are the likeliest somewhere, i64.
    """

    memory: Tensor
    decoding: _Decoding
    offered: IdArray
    best: Tensor


def _same_frozen_encoder(teacher: Transformer, student: Transformer) -> bool:
    """Whether one pass of the encoder serves both: equal, never changing, and without dropout."""
    theirs = dict(teacher.named_parameters())
    if student.config.dropout:
        return False
    for name in ("encoder_layers", "num_heads", "activation", "norm", "positions", "layer_norm_epsilon"):
        if getattr(student.config, name) != getattr(teacher.config, name):
            return False
    return all(
        not parameter.requires_grad and name in theirs and torch.equal(parameter, theirs[name])
        for name, parameter in student.named_parameters()
        if name.startswith(("encoder", "embedding"))
    )
