from __future__ import annotations

import io

import pytest
import sentencepiece

from app.text import Tokenizer

EOS_ID = 0
_WORDS = (
    "the a small red old cat bird house train door book",
    "sees likes finds has takes every one and",
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A tokenizer of 60 pieces, trained on words in a fixed order."""
    words = " ".join(_WORDS).split()
    count = len(words)
    sentences = [
        " ".join(words[(start + step * place) % count] for place in range(6)).capitalize() + "."
        for start in range(count)
        for step in range(1, 6)
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=60,
        character_coverage=1.0,
        hard_vocab_limit=False,
        eos_id=EOS_ID,
        unk_id=1,
        bos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return Tokenizer(processor, eos_id=EOS_ID)
