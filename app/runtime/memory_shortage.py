"""Whether an error means that memory ran out, whoever noticed it and whatever it was passed on as."""

from __future__ import annotations

import errno

from app.errors import DragomanError

_SIGNS = (
    "bad_alloc",
    "failed to allocate",
    "cannot allocate memory",
    "out of memory",
    "alloc_failed",
    "smaller than requested bytes",
)
"""What onnxruntime says, on a CPU and on a GPU: it has one class of errors for this and for damaged files."""


def lacks_memory(error: BaseException) -> bool:
    """Whether the error, or one that it was raised from, is a lack of memory."""
    known: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in known:
        known.add(id(one))
        if isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno == errno.ENOMEM):
            return True
        if not isinstance(one, DragomanError) and any(sign in str(one).lower() for sign in _SIGNS):
            return True
        one = one.__cause__
    return False
