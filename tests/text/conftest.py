from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece

from app.text import Tokenizer

EOS_ID = 0

_SUBJECTS = ("the cat", "a small bird", "my brother", "the old house", "our train", "that long story")
_VERBS = ("sees", "doesn't like", "will find", "never forgets", "has", "takes")
_OBJECTS = ("the red door", "some water", "a book of maps", "every morning", "the way home", "3 apples")


def train_model(**options: object) -> bytes:
    """A SentencePiece model trained on 216 generated sentences; the same bytes every time."""
    sentences = [f"{s} {v} {o}." for s in _SUBJECTS for v in _VERBS for o in _OBJECTS]
    model = io.BytesIO()
    settings: dict[str, object] = {
        "vocab_size": 120,
        "model_type": "unigram",
        "character_coverage": 1.0,
        "hard_vocab_limit": False,
        "eos_id": EOS_ID,
        "unk_id": 1,
        "bos_id": -1,
        "pad_id": -1,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, **(settings | options)
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "tiny.spm"
    path.write_bytes(train_model())
    return path


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.open(model_path, eos_id=EOS_ID)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Unknown characters become one piece per UTF-8 byte instead of the unknown piece."""
    path = tmp_path_factory.mktemp("text") / "bytes.spm"
    path.write_bytes(train_model(byte_fallback=True, vocab_size=360))
    return Tokenizer.open(path, eos_id=EOS_ID)
