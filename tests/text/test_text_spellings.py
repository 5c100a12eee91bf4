from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text import Tokenizer

WORDS = ["the", "cat", "bird", "house", "train", "a red door", "every", "one.", "ttt"]


def all_spellings(tokenizer: Tokenizer, text: str) -> set[tuple[int, ...]]:
    """By definition: every way to cut the text into pieces, the last of which may go on with punctuation."""
    id_of = {
        piece: token_id
        for token_id, piece in enumerate(tokenizer.pieces(range(tokenizer.vocabulary_size)))
        if token_id not in (tokenizer.eos_id, tokenizer.unknown_id)
    }

    def cut(rest: str) -> list[tuple[int, ...]]:
        if not rest:
            return [()]
        ways = [
            (token_id, *way)
            for piece, token_id in id_of.items()
            if rest.startswith(piece)
            for way in cut(rest.removeprefix(piece))
        ]
        return ways + [
            (token_id,)
            for piece, token_id in id_of.items()
            if piece.startswith(rest) and piece != rest and not piece[len(rest)].isalnum()
        ]

    return set(cut("\u2581" + text.replace(" ", "\u2581")))


@pytest.mark.parametrize("text", WORDS)
def test_every_way_to_cut_a_text_into_pieces_is_found(tokenizer: Tokenizer, text: str) -> None:
    found = tokenizer.spellings(text, limit=10**6)
    assert len(found) == len(set(found))
    assert set(found) == all_spellings(tokenizer, text)
    assert len(found) > 1


@settings(max_examples=50, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=5), limit=st.integers(1, 20))
def test_the_usual_spelling_comes_first_and_then_none_is_shorter_than_the_one_before(
    tokenizer: Tokenizer, words: list[str], limit: int
) -> None:
    text = " ".join(words)
    found = tokenizer.spellings(text, limit=limit)
    assert 1 <= len(found) <= limit
    assert [*found[0], tokenizer.eos_id] == tokenizer.encode_source(text)
    sizes = [len(ids) for ids in found[1:]]
    assert sizes == sorted(sizes)
    for ids in found:
        assert tokenizer.decode(ids).startswith(text)


def test_a_text_without_pieces_has_no_spelling_and_an_unknown_character_leaves_one(
    tokenizer: Tokenizer,
) -> None:
    assert tokenizer.spellings(" \u200b", limit=5) == []
    (found,) = tokenizer.spellings("cat 漢", limit=5)
    assert tokenizer.unknown_id in found


def test_a_long_text_has_as_many_spellings_as_are_wanted(tokenizer: Tokenizer) -> None:
    found = tokenizer.spellings("the cat sees a " * 13, limit=32)
    assert len(found) == 32
