"""Vocabularies: the ids that the tokenizer and the models expect, and the same model from the same texts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from app.errors import InvalidOption
from app.text import Tokenizer
from model.data.vocabulary import EOS_ID, UNKNOWN_ID, VocabularyOptions, chosen_sentences, train_vocabulary

_RANDOM = random.Random(5)
_SYLLABLES = [first + second for first in "bdfglmnprst" for second in "aeiou"]
WORDS = ["".join(_RANDOM.choices(_SYLLABLES, k=_RANDOM.randint(1, 3))) for _ in range(150)]
TEXTS = [" ".join(_RANDOM.choices(WORDS, k=8)) for _ in range(300)]


def opened(model: bytes, folder: Path) -> Tokenizer:
    path = folder / "v.spm"
    path.write_bytes(model)
    return Tokenizer.open(path, eos_id=EOS_ID)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_vocabulary_has_the_ids_that_are_expected(tmp_path: Path, kind: str, byte_fallback: bool) -> None:
    options = VocabularyOptions(
        num_pieces=100 + 256 * byte_fallback,
        kind=kind,  # type: ignore[arg-type]
        byte_fallback=byte_fallback,
        user_symbols=("<x1>",),
    )
    tokenizer = opened(train_vocabulary(TEXTS, options), tmp_path)
    assert tokenizer.vocabulary_size == options.num_pieces
    assert tokenizer.unknown_id == UNKNOWN_ID
    assert tokenizer.pieces([0, 1, 2]) == ["</s>", "<unk>", "<x1>"]
    ids = tokenizer.encode_source(TEXTS[0])
    assert ids[-1] == EOS_ID
    assert UNKNOWN_ID not in ids
    assert tokenizer.decode(ids[:-1]) == TEXTS[0]
    assert "<x1>" in tokenizer.pieces(tokenizer.encode_source(f"{WORDS[0]}<x1>{WORDS[1]}"))
    assert (UNKNOWN_ID in tokenizer.encode_source("家")) != byte_fallback


def test_the_model_does_not_depend_on_the_order_of_the_texts() -> None:
    options = VocabularyOptions(num_pieces=100, byte_fallback=False, num_sentences=200)
    shuffled = _RANDOM.sample(TEXTS, len(TEXTS))
    assert train_vocabulary(TEXTS, options) == train_vocabulary(shuffled, options)
    assert len(chosen_sentences(TEXTS, options)) == 200


def test_training_says_nothing_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    train_vocabulary(TEXTS, VocabularyOptions(num_pieces=100, byte_fallback=False))
    assert capfd.readouterr() == ("", "")


def test_too_many_pieces_for_the_text_are_refused_with_the_limit() -> None:
    with pytest.raises(InvalidOption, match=r"value <= .*\[vocabulary\] size"):
        train_vocabulary(["one two three"] * 3, VocabularyOptions(num_pieces=5000))


def test_no_text_is_refused() -> None:
    with pytest.raises(InvalidOption, match="no text"):
        train_vocabulary(["", " "], VocabularyOptions())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_pieces": 258}, "need 259"),
        ({"character_coverage": 0.5}, "from 0.9 to 1"),
        ({"num_sentences": 0}, "1 or more"),
        ({"user_symbols": ("a b",)}, "has a space"),
        ({"user_symbols": ("a", "a")}, "comes twice"),
    ],
)
def test_impossible_options_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        VocabularyOptions(**fields)  # type: ignore[arg-type]
