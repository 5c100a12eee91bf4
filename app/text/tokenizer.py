"""Text to token ids and back, with a SentencePiece model.

What SentencePiece's normalisation (``nmt_nfkc``, the usual one) does to a text before the model sees it,
observed with version 0.2.3; the translation cannot bring these back:

* white space of any kind, zero-width characters (U+200B, U+200D, U+FEFF) and U+2581 become one space;
  runs of spaces become one, and those at the ends vanish;
* C0 controls other than NUL and white space, DEL and U+FFFD vanish;
* compatibility characters are replaced (full-width letters, ligatures, ``①``, ``Ⅷ``, mathematical letters),
  combining marks are composed (NFKC);
* NUL, C1 controls, soft hyphens, bidi controls and whatever was rare in the training data stay and become
  the unknown piece. Neighbouring unknown characters become one piece.

Segmentation keeps controls, tabs and line breaks out of segments, so these survive a translation.
``Tokenizer.fold_unknown`` replaces typographic characters that a model does not know (many know ``'`` but not
``’``); ``unknown_characters`` counts the rest, to be reported.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from app.errors import BundleCorrupt, InvalidRequest

# Character -> what to write for it when the model does not know it.
_FOLDS: dict[str, str] = (
    dict.fromkeys("’‘‚‛′´`ʼ", "'")
    | dict.fromkeys("“”„‟″«»", '"')
    | dict.fromkeys("‐‑‒–—―−", "-")
    | dict.fromkeys("‹›", "'")
    | {"…": "...", "•": "-", "·": "-", "⁄": "/"}
    # Soft hyphen, joiners, bidi controls: no glyph of their own.
    | dict.fromkeys("\u00ad\u061c\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e", "")
    | dict.fromkeys("\u2060\u2066\u2067\u2068\u2069\ufe0e\ufe0f\ufeff", "")
)


_FEW = 4
"""Up to so many texts are handed to SentencePiece one by one. For a list it starts a thread, even for one
text, and waits until that has had a core: 0.6 ms where all are busy. But each call gives up the interpreter's
lock and waits for it again, so that many texts go in one."""


def check_text(text: str, *, name: str) -> None:
    r"""Refuse a text that has no UTF-8 form.

    NUL and other controls pass: they are legal text, and segmentation keeps them in the gaps.

    Args:
        text: what the caller sent (JSON can carry ``"\ud800"``).
        name: the field, for the message; the message never holds the text.

    Raises:
        InvalidRequest: a lone surrogate; names the field and the index (in code points) of the first one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Not chained: that error carries the whole text.
        raise InvalidRequest(
            f"{name} holds a lone surrogate (U+{ord(text[error.start]):04X}) at index {error.start}, which"
            " no valid Unicode text has; send surrogate pairs whole or replace it by U+FFFD"
        ) from None


class Tokenizer:
    """A SentencePiece model with the id that ends a source.

    Thread-safe: nothing that shows changes after ``open``, and SentencePiece releases the GIL while it
    encodes or decodes (two threads on two cores: 1.8 times the throughput of one).
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, *, eos_id: int) -> None:
        """Wrap a loaded processor; ``open`` is the usual way."""
        self._processor = processor
        self._eos_id = eos_id
        self._unknown_id = int(processor.unk_id())
        self._folds = self._unknown_folds()

    @classmethod
    def open(cls, path: Path, *, eos_id: int) -> Tokenizer:
        """Load a ``.spm`` file.

        Args:
            path: the SentencePiece model.
            eos_id: id appended to every source, from the bundle's manifest (it need not be the model's own).

        Raises:
            BundleCorrupt: the file is missing or not a SentencePiece model, or has no piece ``eos_id``.
        """
        processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(path.read_bytes())
        except OSError as error:
            raise BundleCorrupt(
                f"cannot read the tokenizer {path}: {error.strerror}; fetch or export the bundle again"
            ) from error
        except RuntimeError as error:  # what the library raises for any damage
            raise BundleCorrupt(
                f"{path} is not a complete SentencePiece model; fetch or export the bundle again"
            ) from error
        vocabulary_size = int(processor.get_piece_size())
        if not 0 <= eos_id < vocabulary_size:
            raise BundleCorrupt(
                f"EOS id {eos_id} is outside the {vocabulary_size} pieces of {path}; the manifest and the"
                " tokenizer do not belong together: fetch or export the bundle again"
            )
        return cls(processor, eos_id=eos_id)

    @property
    def vocabulary_size(self) -> int:
        """Number of pieces; ids are below it."""
        return int(self._processor.get_piece_size())

    @property
    def eos_id(self) -> int:
        """Id appended to every source."""
        return self._eos_id

    @property
    def unknown_id(self) -> int:
        """Id of the unknown piece."""
        return self._unknown_id

    def encode_source(self, text: str) -> list[int]:
        """Return the ids of ``text``, EOS at the end.

        The text must have passed ``check_text``.
        """
        ids: list[int] = self._processor.encode(text)
        ids.append(self._eos_id)
        return ids

    def encode_sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Return ``encode_source`` of each text; few of them one by one, see `_FEW`."""
        if len(texts) <= _FEW:
            return [self.encode_source(text) for text in texts]
        batch: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        for ids in batch:
            ids.append(self._eos_id)
        return batch

    def count(self, text: str) -> int:
        """Return the number of ids of ``text``, EOS included."""
        return len(self._processor.encode(text)) + 1

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of target ids, which hold no EOS.

        An unknown piece becomes " ⁇ " (SentencePiece's own choice).

        Raises:
            IndexError: an id is negative or not below ``vocabulary_size``.
        """
        if not ids:
            return ""
        return str(self._processor.decode(list(ids)))

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        """Return ``decode`` of each sequence; few of them one by one, see `_FEW`."""
        if len(batch) <= _FEW:
            return [self.decode(ids) for ids in batch]
        texts: list[str] = self._processor.decode([list(ids) for ids in batch], num_threads=1)
        return texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the piece of each id; U+2581 stands for a space, EOS and unknown have the model's names.

        Raises:
            IndexError: an id is negative or not below ``vocabulary_size``.
        """
        return [str(self._processor.id_to_piece(token_id)) for token_id in ids]

    @functools.cached_property
    def joining_ids(self) -> frozenset[int]:
        """The ids, without EOS, whose pieces go on without a space before them."""
        pieces = enumerate(self.pieces(range(self.vocabulary_size)))
        return frozenset(
            token_id
            for token_id, piece in pieces
            if not piece.startswith("\u2581") and token_id != self.eos_id
        )

    def spellings(self, text: str, *, limit: int) -> list[tuple[int, ...]]:
        """Return the id sequences, without EOS, that all give ``text``: its own, then those of fewest pieces.

        A model that learnt one spelling can write the others too. The last piece of some goes on with
        punctuation, as in "2012,".

        Args:
            text: spelled as at the start of a word; nothing spells a blank one. Characters the model does not
                know leave it one spelling, with the unknown id.
            limit: most sequences wanted, at least 1.
        """
        own = tuple(self._processor.encode(text))
        written = "".join(self._processor.encode(text, out_type=str))
        if self._unknown_id in own or not own:
            return [own] if own else []
        ids_from = [self._ids_of_slices(written, start) for start in range(len(written))]
        fewest = [0] * (len(written) + 1)  # pieces from each place to the end
        for start in reversed(range(len(written))):
            fewest[start] = 1 + min((fewest[end] for _, end in ids_from[start]), default=len(written))
        # Paths from start to end in order of their length; `fewest` never overestimates what is missing, so
        # the first to arrive are the shortest (A*, Hart et al. 1968).
        found = {own: None}
        waiting: list[tuple[int, tuple[int, ...], int]] = [(fewest[0], (), 0)]
        while waiting and len(found) < limit:
            _, ids, start = heapq.heappop(waiting)
            if start == len(written):
                found[ids] = None
                continue
            for token_id, end in ids_from[start]:
                if (total := len(ids) + 1 + fewest[end]) <= len(written):
                    heapq.heappush(waiting, (total, (*ids, token_id), end))
        return list(found)

    def _ids_of_slices(self, written: str, start: int) -> list[tuple[int, int]]:
        """The ids of the pieces that ``written`` has at a place, and where each ends."""
        ends = range(start + 1, min(len(written), start + self._longest_piece) + 1)
        found = [(self._id_of[piece], end) for end in ends if (piece := written[start:end]) in self._id_of]
        return found + [(token_id, len(written)) for token_id in self._ids_behind.get(written[start:], ())]

    @functools.cached_property
    def _id_of(self) -> dict[str, int]:
        """Made when first asked for: few requests need it, and it takes as long as the rest of ``open``."""
        ids = range(self.vocabulary_size)
        return {
            piece: token_id
            for token_id, piece in zip(ids, self.pieces(ids), strict=True)
            if not (self._processor.is_control(token_id) or token_id in (self._unknown_id, self._eos_id))
        }

    @functools.cached_property
    def _ids_behind(self) -> dict[str, list[int]]:
        """The ids of the pieces that begin with a string and go on with what is neither letter nor digit."""
        found: dict[str, list[int]] = {}
        for piece, token_id in self._id_of.items():
            for end in range(1, len(piece)):
                if not piece[end].isalnum():
                    found.setdefault(piece[:end], []).append(token_id)
        return found

    @functools.cached_property
    def _longest_piece(self) -> int:
        return max(map(len, self._id_of), default=0)

    def unknown_pieces(self, ids: Sequence[int]) -> int:
        """Return how many ids are the unknown piece (each may stand for several characters)."""
        return sum(1 for token_id in ids if token_id == self._unknown_id)

    def unknown_characters(self, text: str) -> int:
        """Return how many characters of ``text``, after normalisation, the model does not know."""
        ids = self._processor.encode(text)
        if self._unknown_id not in ids:
            return 0
        # As strings, unknown pieces show their characters.
        pieces: list[str] = self._processor.encode(text, out_type=str)
        return sum(
            len(piece) for token_id, piece in zip(ids, pieces, strict=True) if token_id == self._unknown_id
        )

    def fold_unknown(self, text: str) -> str:
        """Replace typographic characters the model does not know by plain ones that it knows.

        Curly quotes, dashes, ellipsis and bullets become ASCII; soft hyphens, joiners and bidi controls
        vanish. A character the model knows is never touched, nor is any letter. Reference implementations
        do not do this, so it is for the caller to ask for.
        """
        return text.translate(self._folds)

    def _unknown_folds(self) -> dict[int, str]:
        return {
            ord(character): replacement
            for character, replacement in _FOLDS.items()
            if self._unknown_id in self._processor.encode(f"a{character}a")
            and self._unknown_id not in self._processor.encode(f"a{replacement}a")
        }
