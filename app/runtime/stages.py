"""Where the time of a request went."""

from __future__ import annotations

from collections.abc import Sequence

from app.runtime.entry import Outcome
from app.runtime.request import Timings


def timings_of(
    outcomes: Sequence[Outcome], *, prepared_s: float, decoded_s: float, total_s: float
) -> Timings:
    """Where the time went; all segments were queued as soon as they were prepared.

    Args:
        outcomes: of the segments.
        prepared_s: seconds from the request's arrival until it was tokenised.
        decoded_s: seconds until its last segment was done.
        total_s: seconds until its texts were put together.
    """
    # A decoding that was joined may have begun before this request came; no stage is longer than its time.
    decoding_s = decoded_s - prepared_s
    decoded = [outcome for outcome in outcomes if outcome.decode_s > 0]
    first = min(decoded, key=lambda outcome: outcome.queue_s, default=None)
    first_row_s = decoded_s if first is None else prepared_s + min(decoding_s, first.queue_s)
    return Timings(
        total_s=total_s,
        queue_s=min(decoding_s, max((outcome.queue_s for outcome in outcomes), default=0.0)),
        decode_s=min(decoding_s, max((outcome.decode_s for outcome in outcomes), default=0.0)),
        prepared_s=prepared_s,
        first_row_s=first_row_s,
        first_encoded_s=min(decoded_s, first_row_s + (0.0 if first is None else first.encode_s)),
        decoded_s=decoded_s,
    )
