"""Training a SentencePiece vocabulary for both languages together."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import sentencepiece

from app.errors import InvalidOption
from model.data.sampling import lowest_hashes

EOS_ID = 0
UNKNOWN_ID = 1
# Part of the recipe: sums of the expectation step depend on it in their last digits.
_NUM_THREADS = 2
# A longer sentence is left out; what stands in one line of a corpus is rarely longer.
_MAX_SENTENCE_BYTES = 8192
_RESERVED = ("</s>", "<unk>", "<s>")


@dataclass(frozen=True)
class VocabularyOptions:
    """What the vocabulary is to be.

    Attributes:
        num_pieces: its size, the two special pieces included.
        kind: ``unigram`` (Kudo, 2018) or ``bpe`` (Sennrich et al., 2016).
        byte_fallback: spell unknown characters in bytes, for which 256 pieces are set aside, rather than
            give them the unknown id.
        character_coverage: share of the characters of the text that get pieces; for languages with
            thousands of characters 0.9995.
        user_symbols: pieces that are never split or joined with others.
        num_sentences: so many sentences are trained on, chosen by a keyed hash; 1,000,000 need some 2 GB.
        seed: of that choice.
    """

    num_pieces: int = 8000
    kind: Literal["unigram", "bpe"] = "unigram"
    byte_fallback: bool = True
    character_coverage: float = 0.9999
    user_symbols: tuple[str, ...] = ()
    num_sentences: int = 1_000_000
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what the trainer would only refuse after a while, or silently bend."""
        num_least = 2 + 256 * self.byte_fallback + len(self.user_symbols) + 1
        if self.num_pieces < num_least:
            raise InvalidOption(
                f"{self.num_pieces} pieces are wanted; the special ones, the bytes and the symbols alone "
                f"need {num_least}"
            )
        if not 0.9 <= self.character_coverage <= 1:
            raise InvalidOption(f"character coverage is {self.character_coverage}; it goes from 0.9 to 1")
        if self.num_sentences < 1:
            raise InvalidOption(f"{self.num_sentences} sentences are to be trained on; give 1 or more")
        if len(set(self.user_symbols)) < len(self.user_symbols) or not all(
            symbol and symbol not in _RESERVED and not any(map(str.isspace, symbol))
            for symbol in self.user_symbols
        ):
            raise InvalidOption(
                "a user symbol is empty, has a space in it, comes twice, or is "
                f"{' or '.join(_RESERVED)}, which have a meaning already; mend the list"
            )


def chosen_sentences(texts: Iterable[str], options: VocabularyOptions) -> list[str]:
    """The sentences that a vocabulary is trained on, the same ones whatever their order."""
    return list(
        lowest_hashes(
            (text for text in texts if text.strip()),
            num_items=options.num_sentences,
            seed=options.seed,
            text_of=str,
            tie_of=str,
        )
    )


def train_vocabulary(texts: Iterable[str], options: VocabularyOptions) -> bytes:
    """A SentencePiece model, for `app.text.Tokenizer`: ``</s>`` is 0, ``<unk>`` 1, and there is no other.

    It normalises by ``nmt_nfkc`` and splits numbers into digits. The same texts in any order give the same
    model with the same version of SentencePiece.

    Args:
        texts: sentences of both languages.
        options: what the vocabulary is to be.

    Returns:
        The serialised model.

    Raises:
        InvalidOption: there is no text, or too little for so many pieces.
    """
    chosen = chosen_sentences(texts, options)
    if not chosen:
        raise InvalidOption("there is no text to train a vocabulary on; give files with text")
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(chosen),
            model_writer=written,
            vocab_size=options.num_pieces,
            model_type=options.kind,
            byte_fallback=options.byte_fallback,
            character_coverage=options.character_coverage,
            user_defined_symbols=list(options.user_symbols),
            split_digits=True,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            eos_id=EOS_ID,
            unk_id=UNKNOWN_ID,
            bos_id=-1,
            pad_id=-1,
            num_threads=_NUM_THREADS,
            train_extremely_large_corpus=False,
            minloglevel=2,  # its progress goes to standard error, some hundred lines
        )
    except RuntimeError as error:
        # The library's words name the limit, such as "set it to a value <= 107", and never the text.
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise InvalidOption(
            f"no vocabulary of {options.num_pieces} pieces can be made of {len(chosen):,} sentences: "
            f"{reason or 'SentencePiece gives no reason'} (in a configuration, [vocabulary] size; on the "
            "command line, --num-pieces)"
        ) from error
    return written.getvalue()
