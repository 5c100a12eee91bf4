"""Finished translations of segments, kept in a bounded number of bytes. Pure; for the event loop only.

*Exactness.* A segment's translation depends on the model, the source's token ids and what is asked of the
decoding; its shortlist candidates follow from model and ids. Texts that the tokenizer maps to the same ids
are one segment to the decoder, so ids are as exact as text, and a key holds all of them. What is asked
enters it as a 256-bit BLAKE2b digest of every field of the options and the plan, future ones included.

*Scores.* Tokens are the same in any company, scores may differ with it in the seventh digit. A kept score
is that of the company in which the segment was translated first: an answer that the decoder did give.

*Alignments* are neither kept nor shared: their weights take up to a hundred times the room of the tokens.

*Eviction* is segmented LRU (Karedla, Love and Wherry 1994): what is new is on probation, and what is asked
for again is protected, in at most 80 % of the room. So a long document of sentences that never come again
drives out what is on probation, and not, as plain LRU would, the strings that come every minute.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from app.decoding.guidance import Guidance
from app.decoding.hypothesis import FinishReason, Hypothesis, LengthNormalisation
from app.decoding.options import DecodingOptions
from app.runtime.guidance_of_request import TargetPlan

_PROTECTED_SHARE = 0.8
_ENTRY_BYTES = 128
"""An entry's part of an ordered dictionary's tables, at their worst, right after they have grown."""
_ROUNDING_BYTES = 16
"""CPython hands out small objects in multiples of it."""

Hypotheses = tuple[Hypothesis, ...]


class CacheLookup(StrEnum):
    """What became of a segment that may be cached."""

    HIT = "hit"
    """It was translated before."""
    MISS = "miss"
    """It is decoded."""
    JOINED = "joined"
    """It waits for the decoding of an equal segment."""


class CacheObserver(Protocol):
    """Called on the event loop; implementations are quick and do not raise."""

    def on_cache_lookup(self, model: str, result: CacheLookup) -> None:
        """A segment was looked up; one that must not be cached is not reported."""
        ...

    def on_cache_size(self, *, num_bytes: int, num_entries: int) -> None:
        """The cache holds so much from now on."""
        ...


class SilentCacheObserver:
    """Watches nothing."""

    def on_cache_lookup(self, model: str, result: CacheLookup) -> None:
        """Ignore."""

    def on_cache_size(self, *, num_bytes: int, num_entries: int) -> None:
        """Ignore."""


class _Packed(NamedTuple):
    """A hypothesis whose token ids are the bytes of 32-bit integers: a fifth of the room of a tuple."""

    token_ids: bytes
    sum_log_probs: float
    finish_reason: FinishReason
    length_penalty: float
    normalisation: LengthNormalisation


class SegmentKeys:
    """The keys of one request's segments, from `TranslationCache.keys`."""

    def __init__(self, model: str, options: DecodingOptions, *, enabled: bool) -> None:
        """Digest what all segments share.

        Args:
            model: bundle id.
            options: the request's.
            enabled: whether segments have keys at all.
        """
        self._enabled = enabled and not options.alignment
        self._shared = hashlib.blake2b(digest_size=32)
        if self._enabled:
            # The representation of a frozen dataclass shows every field, floats to the last digit.
            self._shared.update(repr((model, options)).encode("utf-8", "surrogatepass"))
        # Guidance may name a thousand forbidden sequences and is one object for many segments; it is kept
        # here beside its digest, so that its id is not taken by another one.
        self._digests: dict[tuple[int, int], tuple[Guidance | None, bytes]] = {}

    def key(self, source_ids: Sequence[int], plan: TargetPlan) -> bytes | None:
        """The key of one segment, or None when it must be decoded for this request alone."""
        if not self._enabled or (plan.guidance is not None and plan.guidance.keeps_attention):
            return None
        which = plan.max_target_tokens, id(plan.guidance)
        if which not in self._digests:
            asked = self._shared.copy()
            asked.update(repr(plan).encode("utf-8", "surrogatepass"))
            self._digests[which] = plan.guidance, asked.digest()
        return self._digests[which][1] + array("i", source_ids).tobytes()


class TranslationCache:
    """Finished translations of segments, in a bounded number of bytes.

    For the event loop only.
    """

    def __init__(self, max_bytes: int, *, observer: CacheObserver | None = None) -> None:
        """Start empty.

        Args:
            max_bytes: keys, values and the tables that hold them; 0 switches off keeping and sharing.
            observer: told of every look-up and change of size.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 0, which switches the cache off")
        self._max_bytes = max_bytes
        self._observer = observer or SilentCacheObserver()
        # In the order of their last use, the longest ago first.
        self._probation: OrderedDict[bytes, tuple[_Packed, ...]] = OrderedDict()
        self._protected: OrderedDict[bytes, tuple[_Packed, ...]] = OrderedDict()
        self._num_bytes = 0
        self._num_protected_bytes = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is kept or shared."""
        return self._max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._num_bytes

    @property
    def num_entries(self) -> int:
        """Segments that can be found."""
        return len(self._probation) + len(self._protected)

    def keys(self, model: str, options: DecodingOptions) -> SegmentKeys:
        """The keys of a request's segments."""
        return SegmentKeys(model, options, enabled=self.enabled)

    def find(self, key: bytes | None, *, model: str) -> Hypotheses | None:
        """What was kept for a key, as the decoder gave it."""
        if key is None:
            return None
        packed = self._protected.get(key)
        if packed is not None:
            self._protected.move_to_end(key)
        else:
            packed = self._probation.pop(key, None)
            if packed is None:
                return None
            self._protect(key, packed)
        self._observer.on_cache_lookup(model, CacheLookup.HIT)
        return tuple(map(_unpacked, packed))

    def keep(self, key: bytes | None, hypotheses: Hypotheses) -> None:
        """Keep a translation, unless it has none or weights; what is there already stays."""
        if key is None or key in self._protected or key in self._probation:
            return
        if any(hypothesis.attention is not None for hypothesis in hypotheses):
            return
        packed = tuple(map(_pack, hypotheses))
        size = entry_bytes(key, packed)
        if size > self._max_bytes:
            return
        self._probation[key] = packed
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            self._evict()
        self._tell_size()

    def report(self, model: str, result: CacheLookup) -> None:
        """Tell the observer of a segment that was not found."""
        self._observer.on_cache_lookup(model, result)

    def _protect(self, key: bytes, packed: tuple[_Packed, ...]) -> None:
        self._protected[key] = packed
        self._num_protected_bytes += entry_bytes(key, packed)
        while self._num_protected_bytes > self._max_bytes * _PROTECTED_SHARE:
            oldest, demoted = self._protected.popitem(last=False)
            self._num_protected_bytes -= entry_bytes(oldest, demoted)
            self._probation[oldest] = demoted

    def _evict(self) -> None:
        if self._probation:
            evicted = self._probation.popitem(last=False)
        else:
            evicted = self._protected.popitem(last=False)
            self._num_protected_bytes -= entry_bytes(*evicted)
        self._num_bytes -= entry_bytes(*evicted)

    def _tell_size(self) -> None:
        self._observer.on_cache_size(num_bytes=self._num_bytes, num_entries=self.num_entries)


def entry_bytes(key: bytes, packed: tuple[_Packed, ...]) -> int:
    """What an entry takes in memory. Enum members and small integers are shared and count nothing."""
    return (
        _ENTRY_BYTES
        + _allocated(key)
        + _allocated(packed)
        + sum(
            _allocated(hypothesis)
            + _allocated(hypothesis.token_ids)
            + _allocated(hypothesis.sum_log_probs)
            + _allocated(hypothesis.length_penalty)
            for hypothesis in packed
        )
    )


def _allocated(item: object) -> int:
    return -(-sys.getsizeof(item) // _ROUNDING_BYTES) * _ROUNDING_BYTES


def _pack(hypothesis: Hypothesis) -> _Packed:
    return _Packed(
        array("i", hypothesis.token_ids).tobytes(),
        hypothesis.sum_log_probs,
        hypothesis.finish_reason,
        hypothesis.length_penalty,
        hypothesis.normalisation,
    )


def _unpacked(packed: _Packed) -> Hypothesis:
    token_ids = array("i")
    token_ids.frombytes(packed.token_ids)
    return Hypothesis(
        tuple(token_ids),
        packed.sum_log_probs,
        packed.finish_reason,
        packed.length_penalty,
        packed.normalisation,
    )
