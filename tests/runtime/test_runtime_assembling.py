"""What hypotheses of a guided search become in an answer."""

from __future__ import annotations

import numpy as np
import pytest

from app.decoding.hypothesis import FinishReason, Float32Array, Hypothesis
from app.runtime.preparation import PreparedText, assemble, prepare
from app.runtime.request import WarningCode
from app.text import Tokenizer


@pytest.fixture
def prepared(tokenizer: Tokenizer) -> PreparedText:
    return prepare("The cat sees.", language="en", tokenizer=tokenizer, max_source_tokens=16)


def hypothesis(
    ids: tuple[int, ...],
    attention: Float32Array | None = None,
    reason: FinishReason = FinishReason.EOS,
) -> Hypothesis:
    return Hypothesis(ids, -1.0, reason, attention=attention)


def test_padding_is_cut_off_and_weights_have_four_digits(
    tokenizer: Tokenizer, prepared: PreparedText
) -> None:
    source_ids = prepared.segments[0].source_ids
    own = np.random.default_rng(3).dirichlet(np.ones(len(source_ids)), size=2).astype(np.float32)  # [2,S]
    padded = np.concatenate([own, np.full((2, 4), 7.0, dtype=np.float32)], axis=1)
    best, other = hypothesis(source_ids[:2], padded), hypothesis(source_ids[:2], padded)
    result = assemble(prepared, [(best, other)], tokenizer, with_alignment=True)
    alignment = result.segments[0].alignment
    assert alignment is not None
    assert alignment.source_tokens == tuple(tokenizer.pieces(source_ids))
    assert alignment.target_tokens == tuple(tokenizer.pieces(source_ids[:2]))
    np.testing.assert_allclose(alignment.weights, own, atol=0.5e-4 + 1e-9)
    for row in alignment.weights:
        assert all(len(repr(weight)) <= len("0.1234") for weight in row)
    assert not hasattr(result.segments[0].alternatives[0], "alignment")


def test_an_empty_translation_has_an_empty_alignment(tokenizer: Tokenizer, prepared: PreparedText) -> None:
    result = assemble(prepared, [(hypothesis(()),)], tokenizer, with_alignment=True)
    alignment = result.segments[0].alignment
    assert alignment is not None
    assert (alignment.target_tokens, alignment.weights) == ((), ())
    assert alignment.source_tokens[-1] == tokenizer.pieces([tokenizer.eos_id])[0]


def test_without_the_option_there_is_none(tokenizer: Tokenizer, prepared: PreparedText) -> None:
    weights = np.ones((2, 8), dtype=np.float32)
    result = assemble(prepared, [(hypothesis((2, 3), weights),)], tokenizer)
    assert result.segments[0].alignment is None


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (FinishReason.LENGTH, "its limit of 2 tokens"),
        (FinishReason.FORBIDDEN, "forbid everything that could"),
    ],
)
def test_an_incomplete_translation_says_why_it_stopped(
    tokenizer: Tokenizer, prepared: PreparedText, reason: FinishReason, said: str
) -> None:
    result = assemble(prepared, [(hypothesis((2, 3), reason=reason),)], tokenizer)
    (warning,) = result.warnings
    assert warning.code is WarningCode.TARGET_TRUNCATED
    assert said in warning.message
    assert "2 tokens" in warning.message
    assert result.segments[0].finish_reason is reason
    assert assemble(prepared, [(hypothesis((2, 3)),)], tokenizer).warnings == ()
