"""A student with self-attention in the decoder that begins as a copy of a teacher.

Where the teacher has self-attention too, everything is copied. Where it is recurrent, the student has gated
self-attention with two queries for each key, which is what is left to make: see
`model.distillation.recurrence`.
"""

from __future__ import annotations

from dataclasses import replace

from app.errors import InvalidOption
from model.transformer import Transformer


def student_of(teacher: Transformer, *, dropout: float = 0.0) -> Transformer:
    """A Transformer with self-attention in the decoder and the teacher's weights wherever they fit.

    A teacher that has self-attention already is copied. The rest is drawn from torch's generator.

    Raises:
        InvalidOption: the teacher is pre-norm with SSRU, whose norms stand elsewhere than self-attention's.
    """
    config = replace(teacher.config, dropout=dropout)
    if teacher.config.decoder_cell == "ssru":
        config = replace(config, decoder_cell="gated_attention", decoder_query_heads=2 * config.num_heads)
    if teacher.config.decoder_cell == "ssru" and config.norm != "post":
        raise InvalidOption("a pre-norm SSRU teacher has no counterpart; take from_teacher = false")
    student = Transformer(config)
    copied = {
        name: tensor
        for name, tensor in teacher.state_dict().items()
        if name in student.state_dict() and ".cell." not in name
    }
    missing, _ = student.load_state_dict(copied, strict=False)
    if missing and teacher.config.decoder_cell != "ssru":
        raise InvalidOption(f"the teacher lacks {len(missing)} parameters, such as {missing[0]}")
    return student
