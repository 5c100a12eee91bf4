"""Where a running service has its keys from: the environment, and a file read again when it changes."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence

import structlog

from app.errors import DragomanError, InvalidRequest, SettingsError
from app.keys.file import KeyFile
from app.keys.key import ApiKey, Scope, digest_of
from app.keys.ring import KeyRing

_MIN_CHARACTERS = 22
"""128 random bits in base64; what is shorter can be guessed, or is a password."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.keys")

_Version = tuple[int, int, int]


def keys_from_environment(listed: str, scopes: frozenset[Scope], *, variable: str) -> tuple[ApiKey, ...]:
    """Read ``name=key`` or ``name=sha256:<hex digest>``, separated by commas.

    Args:
        listed: the variable's value.
        scopes: what all of these keys open.
        variable: the variable's name, for messages; they never repeat its value.

    Raises:
        SettingsError: an entry has no name, or a key that could be guessed.
    """
    keys = []
    entries = [stripped for entry in listed.split(",") if (stripped := entry.strip())]
    for number, entry in enumerate(entries, start=1):
        name, equals, value = (part.strip() for part in entry.partition("="))
        where = f"{variable}: entry {number}"
        if not (name and equals and value):
            raise SettingsError(f"{where} is not name=key or name=sha256:<64 hex digits>")
        if _DIGEST.fullmatch(value):
            digest = bytes.fromhex(value.removeprefix("sha256:"))
        elif len(value) < _MIN_CHARACTERS or value.startswith("sha256:"):
            raise SettingsError(
                f"{where} has {len(value)} characters and is no sha256 digest of 64 hex digits; a key needs "
                f"at least {_MIN_CHARACTERS} random ones; make it with `openssl rand -base64 32`"
            )
        else:
            digest = digest_of(value.encode())
        try:
            keys.append(ApiKey(f"env-{hashlib.sha256(digest).hexdigest()[:8]}", name, digest, scopes))
        except InvalidRequest as error:
            raise SettingsError(f"{where}: {error.message}") from None
    return tuple(keys)


class KeySource:
    """The present keys; whoever uses them asks whether the file has changed, and has it read again.

    A file that becomes unreadable or damaged leaves the former keys in force: neither does a slip of the
    editor lock everybody out, nor does it let anybody in.
    """

    def __init__(
        self,
        fixed: Sequence[ApiKey],
        file: KeyFile | None = None,
        *,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read everything once.

        Args:
            fixed: keys that stay as long as the service runs.
            file: read now, and again when it has changed.
            interval_s: least seconds between two looks at the file.
            clock: seconds, monotonic.

        Raises:
            SettingsError: the file is missing or damaged, or two keys are the same.
        """
        self._fixed = tuple(fixed)
        self._file = file
        self._interval_s = interval_s
        self._clock = clock
        self._next_look_s = clock() + interval_s
        self._version = self._present_version()
        try:
            self._ring = KeyRing((*self._fixed, *(file.read() if file else ())))
        except InvalidRequest as error:
            raise SettingsError(error.message) from None

    @property
    def ring(self) -> KeyRing:
        """The keys as they were last read."""
        return self._ring

    def has_changed(self) -> bool:
        """Whether the file is to be read again; True once for each change, so that only one caller does.

        Costs a clock reading, and a `stat` once an interval.
        """
        if self._file is None or (now_s := self._clock()) < self._next_look_s:
            return False
        self._next_look_s = now_s + self._interval_s
        before, self._version = self._version, self._present_version()
        return self._version != before

    def reload(self) -> None:
        """Read the file again; in any thread, since a large file takes some milliseconds."""
        try:
            ring = KeyRing((*self._fixed, *(self._file.read() if self._file else ())))
        except DragomanError as error:
            # Said once for each state of the file.
            _log.error("keys_not_reloaded", reason=error.message, num_keys=len(self._ring.keys))
            return
        self._ring = ring
        _log.info("keys_reloaded", num_keys=len(ring.keys))

    def _present_version(self) -> _Version | None:
        """Which state the file is in: a replaced one has another inode even within one tick of mtime."""
        if self._file is None:
            return None
        try:
            found = os.stat(self._file.path)
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino)
