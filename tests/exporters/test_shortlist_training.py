"""From counted links to lists: what every sentence is allowed, what no sentence is, and what is best."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer, tiny_words

from app.decoding.shortlist import Shortlist
from app.errors import InvalidOption
from app.text import Tokenizer
from exporters.shortlist_training import ShortlistOptions, build_shortlist, train_shortlist
from exporters.word_alignment import LexicalTable

V = 24
EOS, UNKNOWN = 2, 0
LINKS = {(5, 9): 6, (5, 8): 3, (5, 7): 3, (5, 6): 1, (5, UNKNOWN): 9, (UNKNOWN, 6): 4, (10, 11): 1}
"""(source, target) -> how often."""


def table_of(links: dict[tuple[int, int], int], frequency: dict[int, int] | None = None) -> LexicalTable:
    ordered = sorted(links)
    return LexicalTable(
        sources=np.array([source for source, _ in ordered], dtype=np.int32),
        targets=np.array([target for _, target in ordered], dtype=np.int32),
        counts=np.array([links[pair] for pair in ordered], dtype=np.int64),
        target_frequency=np.array([(frequency or {}).get(n, 0) for n in range(V)], dtype=np.int64),
    )


def build(table: LexicalTable, **options: object) -> Shortlist:
    chosen = {"num_frequent": 0, "num_best": V, "min_probability": 0.0, "copies": False} | options
    return build_shortlist(table, ShortlistOptions(**chosen), eos_id=EOS, never=(UNKNOWN,))  # type: ignore[arg-type]


def targets(shortlist: Shortlist, source: int) -> list[int]:
    return shortlist.targets_of(source).tolist()


def test_the_best_targets_are_the_most_often_linked_and_equal_ones_go_by_id() -> None:
    assert targets(build(table_of(LINKS), num_best=1), 5) == [EOS, 9]
    assert targets(build(table_of(LINKS), num_best=2), 5) == [EOS, 7, 9]
    assert targets(build(table_of(LINKS), num_best=3), 5) == [EOS, 7, 8, 9]


def test_a_smallest_probability_cuts_by_the_share_of_the_source_tokens_links() -> None:
    # Token 5 has 22 links.
    assert targets(build(table_of(LINKS), min_probability=3 / 22), 5) == [EOS, 7, 8, 9]
    assert targets(build(table_of(LINKS), min_probability=3.01 / 22), 5) == [EOS, 9]
    assert targets(build(table_of(LINKS), min_probability=0.99), 10) == [EOS, 11]


def test_every_sentence_is_allowed_the_frequent_tokens() -> None:
    table = table_of(LINKS, {20: 5, 21: 9, 22: 5, UNKNOWN: 50, 23: 0})
    assert targets(build(table, num_frequent=2), EOS) == [EOS, 20, 21]
    # Tokens that never occur are not frequent, however many are wanted.
    shortlist = build(table, num_frequent=V)
    assert targets(shortlist, EOS) == [EOS, 20, 21, 22]
    assert {20, 21, 22} <= set(shortlist.candidates([5, EOS]).tolist())


def test_copies_let_a_token_stand_for_itself_but_never_the_unknown_piece() -> None:
    shortlist = build(table_of(LINKS), copies=True)
    for source in range(V):
        expected = set() if source == UNKNOWN else {source}
        assert expected <= set(targets(shortlist, source))
        assert UNKNOWN not in targets(shortlist, source)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_frequent": -1}, "frequent tokens is -1"),
        ({"num_best": 0}, "best targets is 0"),
        ({"min_probability": 1.0}, r"probability is 1\.0"),
        ({"min_probability": float("nan")}, "probability is nan"),
    ],
)
def test_options_that_leave_no_list_are_refused(options: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        ShortlistOptions(**options)  # type: ignore[arg-type]


ids = st.integers(0, V - 1)


@given(
    st.dictionaries(st.tuples(ids, ids), st.integers(1, 4), min_size=1, max_size=40),
    st.dictionaries(ids, st.integers(0, 3), max_size=V),
    st.integers(0, 6),
    st.integers(1, 4),
    st.floats(0, 0.9),
    st.booleans(),
)
def test_the_lists_are_those_of_the_definition(
    links: dict[tuple[int, int], int],
    frequency: dict[int, int],
    num_frequent: int,
    num_best: int,
    min_probability: float,
    copies: bool,
) -> None:
    shortlist = build(
        table_of(links, frequency),
        num_frequent=num_frequent,
        num_best=num_best,
        min_probability=min_probability,
        copies=copies,
    )
    by_frequency = sorted(
        (n for n in frequency if frequency[n] and n != UNKNOWN), key=lambda n: (-frequency[n], n)
    )
    for source in range(V):
        counts = {target: count for (owner, target), count in links.items() if owner == source}
        total = sum(counts.values())
        ranked = sorted(
            (n for n in counts if n != UNKNOWN and counts[n] / total >= min_probability),
            key=lambda n: (-counts[n], n),
        )
        expected = {EOS, *ranked[:num_best]}
        if source == EOS:
            expected |= set(by_frequency[:num_frequent])
        if copies and source != UNKNOWN:
            expected.add(source)
        assert targets(shortlist, source) == sorted(expected)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(tiny_tokenizer())
    return Tokenizer(processor, eos_id=0)


def made_up_text() -> list[tuple[str, str]]:
    words = tiny_words()
    return [(words[n % 40], words[40 + n % 40]) for n in range(120)]


def test_trained_lists_allow_the_translations_that_were_seen(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("thot")
    options = ShortlistOptions(num_frequent=2, num_best=8)
    messages: list[str] = []
    texts = [*made_up_text(), ("", "a")]
    trained = train_shortlist(texts, tokenizer, options, max_tokens=30, progress=messages.append)
    assert (trained.num_pairs, trained.num_empty, trained.num_long) == (120, 1, 0)
    assert messages
    shares = []
    for source, target in made_up_text()[:40]:
        candidates = trained.shortlist.candidates(tokenizer.encode_source(source))
        assert tokenizer.eos_id in candidates
        shares.append(np.isin(tokenizer.encode_source(target), candidates).mean())
    assert np.mean(shares) > 0.9

    again = train_shortlist(made_up_text(), tokenizer, options, max_tokens=30)
    assert again.shortlist == trained.shortlist
    assert again.provenance == trained.provenance
    assert trained.provenance["shortlist_pairs"] == "120"
    trained.shortlist.save(tmp_path / "list")
    assert Shortlist.load(tmp_path / "list") == trained.shortlist
