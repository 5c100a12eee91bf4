"""What a soak test sends before it measures: more of every kind at once than there are rows for it.

A row slot takes memory when a segment first sits there. Which slots a mix of requests reaches depends on
chance, so that memory would creep up for hours without a leak; once all have been used, growth is growth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.soak_requests import MAX_BEAM_SIZE, PAIRS, endless_text, sentence

_FIRST_NUMBER = 10_000_000
"""Of texts that the mix never sends."""
_LONG = 6
"""Makes a source of more than 64 tokens that is still one segment."""


def flood(*, max_rows: int, num_workers: int) -> Iterator[dict[str, Any]]:
    """Bodies of requests in the native dialect, one kind of search after the other.

    Args:
        max_rows: rows of a group of the server's workers.
        num_workers: that it has.
    """
    searches: list[dict[str, Any]] = [{}, {"no_repeat_ngram_size": 2}]
    searches += [{"beam_size": beam_size} for beam_size in range(2, MAX_BEAM_SIZE + 1)]
    first = _FIRST_NUMBER
    for pair in PAIRS:
        source, _, target = pair.partition("-")
        for options in searches:
            # Half as many again: segments go to the worker with the fewest tokens, not in turns.
            num_texts = max_rows // options.get("beam_size", 1) * num_workers * 3 // 2
            numbers = range(first, first + num_texts)
            first += num_texts
            texts = [[sentence(pair, number) for number in numbers]]
            if not options:
                texts.append([endless_text(_LONG, number) for number in numbers])
            for of_request in texts:
                yield {"texts": of_request, "source": source, "target": target, "options": options}
