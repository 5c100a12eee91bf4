from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from app.decoding.hypothesis import FinishReason, Hypothesis
from app.decoding.shortlist import Shortlist
from app.runtime.preparation import assemble, prepare
from app.runtime.request import WarningCode
from app.text import Tokenizer

words = st.sampled_from(
    [
        "the",
        "cat",
        "sees",
        "a",
        "red",
        "bird",
        "é",
        "Ünï",
        "3.14",
        "—",
        "“old”",
        "don’t",
        "x" * 40,
        "漢字",
        "\ufeff",
    ]
)
gaps = st.sampled_from(
    [" ", ". ", "! ", ", ", "\n", "\r\n\r\n", "\t", "  \u00a0 ", "\x00", "", "...\n", "; "]
)
texts = st.one_of(
    st.lists(st.tuples(words, gaps), max_size=40).map(lambda parts: "".join(a + b for a, b in parts)),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
)


@settings(max_examples=150, deadline=None)
@given(text=texts, max_source_tokens=st.integers(4, 40))
def test_a_prepared_text_joins_to_itself_and_every_segment_fits(
    tokenizer: Tokenizer, text: str, max_source_tokens: int
) -> None:
    prepared = prepare(text, language="en", tokenizer=tokenizer, max_source_tokens=max_source_tokens)
    sources = [segment.source for segment in prepared.segments]
    assert prepared.layout.join(sources) == text
    assert len(prepared.layout.gaps) == len(sources) + 1
    for segment in prepared.segments:
        assert 1 <= len(segment.source_ids) <= max_source_tokens
        assert segment.source_ids[-1] == tokenizer.eos_id
        assert list(segment.source_ids) == tokenizer.encode_source(tokenizer.fold_unknown(segment.source))
    assert prepared.num_tokens == sum(len(segment.source_ids) for segment in prepared.segments)
    assert [warning.segment for warning in prepared.warnings] == sorted(
        warning.segment for warning in prepared.warnings
    )
    for warning in prepared.warnings:
        assert 0 <= warning.segment < len(prepared.segments)
    unknown = {w.segment for w in prepared.warnings if w.code is WarningCode.UNKNOWN_CHARACTERS}
    assert unknown == {
        index for index, segment in enumerate(prepared.segments) if tokenizer.unknown_id in segment.source_ids
    }


@settings(max_examples=100, deadline=None)
@given(text=texts, max_source_tokens=st.integers(4, 40))
def test_translations_take_the_segments_places_and_gaps_stay(
    tokenizer: Tokenizer, text: str, max_source_tokens: int
) -> None:
    prepared = prepare(text, language="en", tokenizer=tokenizer, max_source_tokens=max_source_tokens)
    hypotheses = [
        Hypothesis(segment.source_ids[:-1], -1.0, FinishReason.EOS) for segment in prepared.segments
    ]
    result = assemble(prepared, [(hypothesis,) for hypothesis in hypotheses], tokenizer)
    decoded = [tokenizer.decode(hypothesis.token_ids) for hypothesis in hypotheses]
    assert [segment.target for segment in result.segments] == decoded
    assert result.text == prepared.layout.join(decoded)
    assert (
        "".join(g + s.source for g, s in zip(prepared.layout.gaps, result.segments, strict=False))
        + (prepared.layout.gaps[-1])
        == text
    )
    assert result.warnings == prepared.warnings


def test_a_segment_that_does_not_fit_is_wrapped_and_the_warning_says_how(tokenizer: Tokenizer) -> None:
    long = " ".join(["the cat sees a red bird"] * 5)
    prepared = prepare(f"A cat.\n{long}.\nOne.", language="en", tokenizer=tokenizer, max_source_tokens=12)
    (warning,) = prepared.warnings
    num_pieces = len(prepared.segments) - 2
    assert warning.code is WarningCode.SEGMENT_WRAPPED
    assert warning.segment == 1
    assert f"in {num_pieces} pieces" in warning.message
    assert "exceeds the model's 12" in warning.message
    assert long not in warning.message
    assert prepared.segments[-1].source == "One."


def test_a_translation_cut_by_its_limit_is_reported_at_its_segment(tokenizer: Tokenizer) -> None:
    prepared = prepare("A cat. A bird.", language="en", tokenizer=tokenizer, max_source_tokens=12)
    result = assemble(
        prepared,
        [[Hypothesis((5,), -1.0, FinishReason.EOS)], [Hypothesis((5, 6), -1.0, FinishReason.LENGTH)]],
        tokenizer,
    )
    (warning,) = result.warnings
    assert (warning.code, warning.segment) == (WarningCode.TARGET_TRUNCATED, 1)
    assert "2 tokens" in warning.message
    assert [segment.finish_reason for segment in result.segments] == [FinishReason.EOS, FinishReason.LENGTH]


def test_every_segment_wrapped_or_not_brings_its_candidates(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocabulary_size
    offsets = np.arange(size + 1, dtype=np.int64)
    shortlist = Shortlist(offsets, np.arange(size, dtype=np.int32), num_frequent=4)
    text = "A cat.\n" + " ".join(["the cat sees a red bird"] * 5)
    prepared = prepare(text, language="en", tokenizer=tokenizer, max_source_tokens=12, shortlist=shortlist)
    assert len(prepared.segments) > 3
    for segment in prepared.segments:
        assert segment.candidates is not None
        assert segment.candidates.tolist() == shortlist.candidates(segment.source_ids).tolist()
    without = prepare(text, language="en", tokenizer=tokenizer, max_source_tokens=12)
    assert {segment.candidates for segment in without.segments} == {None}


def test_further_hypotheses_of_a_segment_are_its_alternatives_best_first(tokenizer: Tokenizer) -> None:
    prepared = prepare("A cat.", language="en", tokenizer=tokenizer, max_source_tokens=12)
    ranked = [Hypothesis((5 + index,), -1.0 - index, FinishReason.EOS) for index in range(3)]
    (segment,) = assemble(prepared, [ranked], tokenizer).segments
    assert segment.target == tokenizer.decode([5])
    assert [other.target for other in segment.alternatives] == [tokenizer.decode([6]), tokenizer.decode([7])]
    assert [other.score for other in segment.alternatives] == [ranked[1].score, ranked[2].score]
