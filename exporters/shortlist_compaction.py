"""A smaller lexical shortlist that allows no less: what most lists hold is written once.

Lists as importers bring them hold as many targets for each source token, and the same few thousand common
words in most of them. The list of end-of-sentence, which ends every source, is a list that every sentence
brings along: targets that go there can leave all others.
"""

from __future__ import annotations

import numpy as np

from app.decoding.shortlist import Shortlist
from app.errors import InvalidOption

DEFAULT_NUM_COMMON = 2000


def compact_shortlist(shortlist: Shortlist, *, num_common: int, eos_id: int) -> Shortlist:
    """Move the targets that most lists hold to the list of end-of-sentence.

    Every sentence keeps its candidates and gets the moved targets besides. What each of them saves is its
    number of lists, so that the most listed ones save most; of equally listed ones the lower ids move.

    Args:
        shortlist: to start from.
        num_common: so many targets move.
        eos_id: ends every source.

    Raises:
        InvalidOption: the number is below 1 or above the vocabulary's size.
    """
    size = shortlist.vocabulary_size
    if not 1 <= num_common <= size:
        raise InvalidOption(f"{num_common} common targets are asked for; the range is 1 to {size}")
    lists = [shortlist.targets_of(source) for source in range(size)]
    sources = np.repeat(np.arange(size, dtype=np.int64), [len(each) for each in lists])
    targets = np.concatenate(lists).astype(np.int64)
    listed = np.bincount(targets, minlength=size)
    common = np.argsort(-listed, kind="stable")[:num_common]
    common = common[listed[common] > 0]
    stay = (sources == eos_id) | ~np.isin(targets, common)
    entries = np.unique(np.concatenate([sources[stay] * size + targets[stay], eos_id * size + common]))
    offsets = np.searchsorted(entries, np.arange(size + 1, dtype=np.int64) * size)
    return Shortlist(
        offsets.astype(np.int64), (entries % size).astype(np.int32), num_frequent=shortlist.num_frequent
    )
