from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BundleCorrupt, InvalidRequest
from app.text import Tokenizer, check_text

SENTENCES = (
    "the cat sees the red door.",
    "my brother never forgets 3 apples.",
    "",
    "our train takes some water.",
)


def test_a_source_ends_with_eos_and_comes_back_without_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_source(SENTENCES[0])
    assert ids[-1] == tokenizer.eos_id
    assert tokenizer.eos_id not in ids[:-1]
    assert tokenizer.decode(ids[:-1]) == SENTENCES[0]


def test_eos_is_the_manifests_not_the_models(model_path: Path) -> None:
    assert Tokenizer.open(model_path, eos_id=7).encode_source("")[-1] == 7


@given(text=st.text(alphabet="the cardonws'3. 日😀\u00a0", max_size=40))
@settings(max_examples=200, deadline=None)
def test_ids_are_in_range_and_count_agrees(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_source(text)
    assert tokenizer.count(text) == len(ids)
    assert all(0 <= token_id < tokenizer.vocabulary_size for token_id in ids)


def test_batch_forms_agree_with_the_single_ones(tokenizer: Tokenizer) -> None:
    batch = tokenizer.encode_sources(SENTENCES)
    assert batch == [tokenizer.encode_source(sentence) for sentence in SENTENCES]
    targets = [ids[:-1] for ids in batch]
    assert tokenizer.decode_batch(targets) == [tokenizer.decode(ids) for ids in targets] == list(SENTENCES)


@pytest.mark.parametrize(("num_texts", "num_calls"), [(0, 0), (1, 1), (4, 4), (5, 1), (300, 1)])
def test_few_texts_go_one_by_one_and_many_at_once(model_path: Path, num_texts: int, num_calls: int) -> None:
    calls: list[bool] = []  # whether each was given a list

    class Counted(sentencepiece.SentencePieceProcessor):
        def encode(self, text, **options):
            calls.append(isinstance(text, list))
            return super().encode(text, **options)

        def decode(self, ids, **options):
            calls.append(isinstance(ids[0], list))
            return super().decode(ids, **options)

    tokenizer = Tokenizer(Counted(model_file=str(model_path)), eos_id=0)
    texts = [f"one two {number}" for number in range(num_texts)]

    calls.clear()
    batch = tokenizer.encode_sources(texts)
    assert calls == [num_calls < num_texts] * num_calls
    assert batch == [tokenizer.encode_source(text) for text in texts]

    calls.clear()
    decoded = tokenizer.decode_batch([ids[:-1] for ids in batch])
    assert calls == [num_calls < num_texts] * num_calls
    assert decoded == [tokenizer.decode(ids[:-1]) for ids in batch]


def test_nothing_in_gives_nothing_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_source("") == [tokenizer.eos_id]
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode_sources([]) == []
    assert tokenizer.decode_batch([]) == []
    assert tokenizer.decode_batch([[], []]) == ["", ""]


def test_any_text_survives_a_model_with_byte_pieces(byte_tokenizer: Tokenizer) -> None:
    text = "the 日本 😀 ß cat"
    ids = byte_tokenizer.encode_source(text)
    assert byte_tokenizer.decode(ids[:-1]) == text
    assert byte_tokenizer.unknown_pieces(ids) == byte_tokenizer.unknown_characters(text) == 0


def test_unknown_characters_are_counted_though_they_share_a_piece(tokenizer: Tokenizer) -> None:
    text = "the 日本語 cat 😀"
    assert tokenizer.unknown_pieces(tokenizer.encode_source(text)) == 2
    assert tokenizer.unknown_characters(text) == 4
    assert tokenizer.unknown_characters("the cat") == 0


def test_folding_replaces_only_what_the_model_does_not_know(
    tokenizer: Tokenizer, byte_tokenizer: Tokenizer
) -> None:
    text = "my brother doesn’t like the ca\u00adt 日."
    assert tokenizer.fold_unknown(text) == "my brother doesn't like the cat 日."
    assert tokenizer.fold_unknown("“x”") == "“x”", "the plain quote is unknown as well"
    assert byte_tokenizer.fold_unknown(text) == text


def test_nul_is_unknown_and_other_controls_vanish(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode_source("cat")
    assert tokenizer.encode_source("c\x01at") == tokenizer.encode_source("\x1bcat") == plain
    assert tokenizer.unknown_characters("c\x00at") == 1


def test_white_space_of_any_kind_is_one_space_to_the_model(tokenizer: Tokenizer) -> None:
    for space in ("  ", "\t", "\u00a0", "\n", "\u200b", "\ufeff"):
        assert tokenizer.encode_source(f" the{space}cat") == tokenizer.encode_source("the cat")


@pytest.mark.parametrize("bad_id", [-1, 10_000])
def test_decoding_an_id_outside_the_vocabulary_is_an_error(tokenizer: Tokenizer, bad_id: int) -> None:
    with pytest.raises(IndexError):
        tokenizer.decode([bad_id])


def test_threads_get_the_same_ids_as_one_thread(tokenizer: Tokenizer) -> None:
    texts = [f"{sentence} {number}" for number in range(500) for sentence in SENTENCES]
    expected = [tokenizer.encode_source(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode_source, texts)) == expected
        assert list(pool.map(tokenizer.decode, expected)) == [tokenizer.decode(ids) for ids in expected]


@pytest.mark.parametrize(
    "keep", [0, 1, 100, -1], ids=["empty", "one byte", "100 bytes", "all but the last byte"]
)
def test_a_damaged_model_names_the_file(model_path: Path, tmp_path: Path, keep: int) -> None:
    damaged = tmp_path / "source.spm"
    damaged.write_bytes(model_path.read_bytes()[:keep])
    with pytest.raises(BundleCorrupt, match=r"source\.spm"):
        Tokenizer.open(damaged, eos_id=0)


def test_a_missing_model_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(BundleCorrupt, match=r"absent\.spm"):
        Tokenizer.open(tmp_path / "absent.spm", eos_id=0)


@pytest.mark.parametrize("eos_id", [-1, 10_000])
def test_an_eos_id_outside_the_vocabulary_is_refused(model_path: Path, eos_id: int) -> None:
    with pytest.raises(BundleCorrupt, match=f"EOS id {eos_id} is outside"):
        Tokenizer.open(model_path, eos_id=eos_id)


@given(before=st.text(max_size=20), surrogate=st.characters(categories=["Cs"]), after=st.text(max_size=20))
def test_the_first_lone_surrogate_is_reported_by_index_without_the_text(
    before: str, surrogate: str, after: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_text("secret" + before + surrogate + after, name="q[3]")
    assert raised.value.message.startswith("q[3] ")
    assert f"at index {6 + len(before)}," in raised.value.message
    assert "secret" not in raised.value.message
    assert raised.value.__cause__ is None


@given(text=st.text())
def test_text_with_a_utf8_form_passes_controls_included(text: str) -> None:
    check_text("\x00\x1b\r\n" + text, name="q")
