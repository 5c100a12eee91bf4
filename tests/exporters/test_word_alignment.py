"""Word alignment: a made-up language whose translations are known is found out, the same way every time."""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np
import pytest
import sentencepiece
from tiny_models import tiny_tokenizer

from app.errors import InvalidOption
from app.text import Tokenizer
from exporters.word_alignment import TokenPairs, lexical_table, tokenize_pairs

pytest.importorskip("thot")

VOCABULARY_SIZE = 60
SHIFT = 30
SOURCE_IDS = range(2, 22)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(tiny_tokenizer())
    return Tokenizer(processor, eos_id=0)


def token_pairs(pairs: list[tuple[list[int], list[int]]]) -> TokenPairs:
    sides = list(zip(*pairs, strict=True))
    flat = [np.concatenate([np.array(ids, dtype=np.int32) for ids in side]) for side in sides]
    offsets = [np.cumsum([0, *(len(ids) for ids in side)], dtype=np.int64) for side in sides]
    return TokenPairs(flat[0], offsets[0], flat[1], offsets[1], 0, 0)


def made_up_pairs(count: int = 150) -> list[tuple[list[int], list[int]]]:
    """Each token's translation is the id 30 higher, and the target's word order is turned round."""
    choice = random.Random(5)
    sources = [choice.sample(SOURCE_IDS, choice.randint(1, 6)) for _ in range(count)]
    return [(ids, [token_id + SHIFT for token_id in reversed(ids)]) for ids in sources]


def test_every_token_is_linked_to_its_translation_above_all() -> None:
    table = lexical_table(token_pairs(made_up_pairs()), vocabulary_size=VOCABULARY_SIZE)
    for source in SOURCE_IDS:
        mine = table.sources == source
        assert table.targets[mine][table.counts[mine].argmax()] == source + SHIFT
        assert table.counts[mine].max() > 0.9 * table.counts[mine].sum()


def test_the_table_is_sorted_and_counts_target_tokens() -> None:
    pairs = made_up_pairs()
    table = lexical_table(token_pairs(pairs), vocabulary_size=VOCABULARY_SIZE)
    keys = table.sources.astype(np.int64) * VOCABULARY_SIZE + table.targets
    assert (np.diff(keys) > 0).all()
    assert (table.counts >= 1).all()
    seen = Counter(token_id for _, target in pairs for token_id in target)
    assert table.target_frequency.tolist() == [seen[token_id] for token_id in range(VOCABULARY_SIZE)]
    assert table.vocabulary_size == VOCABULARY_SIZE


@pytest.mark.parametrize("swapped", [False, True])
def test_both_directions_have_a_say(swapped: bool) -> None:
    # One direction gives each token of its target side one link at most. Where two tokens stand for one, more
    # links than tokens of the shorter side can only come from the other direction.
    choice = random.Random(9)
    pairs = []
    for _ in range(150):
        words = choice.sample(range(2, 10), choice.randint(1, 4))
        sides = [part for word in words for part in (word, word + 8)], [word + SHIFT for word in words]
        pairs.append(sides[::-1] if swapped else sides)
    table = lexical_table(token_pairs(pairs), vocabulary_size=VOCABULARY_SIZE)
    num_short = sum(min(len(source), len(target)) for source, target in pairs)
    assert table.counts.sum() > 1.5 * num_short


def test_the_same_pairs_give_the_same_table() -> None:
    choice = random.Random(3)
    # Noise, so that an aligner which is not fixed by its seed would differ somewhere.
    pairs = [(choice.choices(SOURCE_IDS, k=6), choice.choices(SOURCE_IDS, k=6)) for _ in range(60)]
    first, second = (lexical_table(token_pairs(pairs), vocabulary_size=VOCABULARY_SIZE) for _ in range(2))
    for name in ("sources", "targets", "counts", "target_frequency"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_progress_names_both_directions() -> None:
    messages: list[str] = []
    lexical_table(token_pairs(made_up_pairs(20)), vocabulary_size=VOCABULARY_SIZE, progress=messages.append)
    for direction in ("source to target", "target to source"):
        sweeps = [message for message in messages if message.startswith(f"aligning {direction}: sweep")]
        assert sweeps
        assert sweeps[-1].split()[-3] == sweeps[-1].split()[-1]


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "thot.alignment", None)
    with pytest.raises(InvalidOption, match="pip install sil-thot"):
        lexical_table(token_pairs(made_up_pairs(2)), vocabulary_size=VOCABULARY_SIZE)


def test_pairs_become_the_tokens_that_the_service_makes_of_them(tokenizer: Tokenizer) -> None:
    texts = [("abc de", "fgh"), ("”po”", "a’b")]
    tokens = tokenize_pairs(texts, tokenizer, max_tokens=20)
    expected = [
        tuple(tokenizer.encode_source(tokenizer.fold_unknown(text))[:-1] for text in pair) for pair in texts
    ]
    assert list(tokens) == expected
    assert (len(tokens), tokens.num_empty, tokens.num_long) == (2, 0, 0)


def test_pairs_that_are_left_out_are_counted(tokenizer: Tokenizer) -> None:
    texts = [("abc", "def"), ("", "abc"), ("abc", " "), ("abc " * 30, "abc"), ("abc", "p" * 99)]
    tokens = tokenize_pairs(texts, tokenizer, max_tokens=20)
    assert (len(tokens), tokens.num_empty, tokens.num_long) == (1, 2, 2)


def test_text_beyond_one_chunk_is_read_in_order(tokenizer: Tokenizer) -> None:
    texts = [("ab" if n % 3 else "cd", "ef") for n in range(50_000)]
    messages: list[str] = []
    tokens = tokenize_pairs(iter(texts), tokenizer, max_tokens=20, progress=messages.append)
    assert messages == ["tokenising: 50,000 pairs read"]
    kinds = [tokenizer.encode_source(text)[:-1] for text in ("cd", "ab", "ab")]
    for n, (source, _) in zip(range(21_000), tokens, strict=False):
        assert source == kinds[n % 3]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([], "of 0 pairs"),
        ([("", "abc"), ("abc " * 30, "abc")], "of 2 pairs 1 have an empty side and 1 a side"),
    ],
)
def test_text_that_leaves_nothing_is_refused_with_the_reasons(
    tokenizer: Tokenizer, texts: list[tuple[str, str]], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        tokenize_pairs(texts, tokenizer, max_tokens=20)
