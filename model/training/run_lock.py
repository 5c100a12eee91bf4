"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import InvalidOption

LOCK_NAME = ".lock"


@contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Hold the folder; the system lets go of it when the process ends, however that comes.

    Raises:
        InvalidOption: another process holds it.
    """
    with (folder / LOCK_NAME).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidOption(
                f"another run writes into {folder}; wait until it ends, stop it, or name another output"
            ) from None
        yield
