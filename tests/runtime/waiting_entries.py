"""Entries for a scheduler that is driven by hand."""

from __future__ import annotations

from fake_runner import make_waiter

from app.runtime.entry import Entry
from app.runtime.request import Priority

INTERACTIVE, BULK = Priority.INTERACTIVE, Priority.BULK
SHARE = 0.75


def entry_of(
    num_tokens: int,
    *,
    request: int = 0,
    priority: Priority = INTERACTIVE,
    deadline_s: float | None = None,
) -> Entry:
    return make_waiter(
        range(1, num_tokens + 1), request=request, priority=priority, deadline_s=deadline_s
    ).entry
