"""The file that keys are kept in: JSON, replaced as a whole, readable by its owner alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from app.errors import InvalidRequest, SettingsError
from app.keys.key import MAX_LIMIT, ApiKey, Limits, Scope
from app.keys.ring import KeyRing

MAX_FILE_BYTES = 4 * 1024 * 1024
"""Some ten thousand keys: reading more would hold up the requests that wait for it."""
_MODE = 0o600
_KEPT_MODE_BITS = 0o640

_Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)] | None


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _LimitsRecord(_Record):
    requests_per_second: _Limit = None
    characters_per_minute: _Limit = None
    characters_per_day: _Limit = None


class _KeyRecord(_Record):
    id: str
    name: str
    hash: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
    scopes: list[Scope]
    created_at: AwareDatetime | None = None
    expires_at: AwareDatetime | None = None
    revoked_at: AwareDatetime | None = None
    limits: _LimitsRecord = Field(default_factory=_LimitsRecord)


class _FileRecord(_Record):
    version: Literal[1] = 1
    keys: list[_KeyRecord] = []


class KeyFile:
    """A file of keys.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        """Name the file; nothing is read yet."""
        self.path = path

    def read(self) -> tuple[ApiKey, ...]:
        """All keys, the revoked and expired ones too.

        Raises:
            SettingsError: there is no such file, it cannot be read, or it is not a file of keys.
        """
        try:
            if not self.path.is_file():
                raise SettingsError(
                    f"{self.path} is no file of API keys; create one with `dragoman keys create NAME --file`"
                )
            if (size := self.path.stat().st_size) > MAX_FILE_BYTES:
                raise SettingsError(
                    f"{self.path} has {size} bytes, the limit of a file of API keys is {MAX_FILE_BYTES}; "
                    "remove keys that are revoked or expired"
                )
            raw = self.path.read_bytes()
        except OSError as error:
            raise SettingsError(
                f"{self.path} cannot be read ({error.strerror}); the service's user must be able to"
            ) from None
        try:
            keys = tuple(_key_of(record) for record in _FileRecord.model_validate_json(raw).keys)
            KeyRing(keys)
        except ValidationError as error:
            # Its own message repeats the input, in which somebody may have put a key.
            fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(str(part) for part in fault["loc"]) or "the document"
            raise SettingsError(f"{self.path}: {place}: {fault['msg']}; mend it, or make it anew") from None
        except InvalidRequest as error:
            raise SettingsError(f"{self.path}: {error.message}") from None
        return keys

    def update(self, change: Callable[[tuple[ApiKey, ...]], tuple[ApiKey, ...]]) -> None:
        """Replace the keys by what `change` makes of them; two commands at once wait for each other.

        A reader sees the old file or the new one, never a part. A file that does not exist yet is made
        with mode 0600; one that does keeps its owner, and of its mode what lets its group read it.

        Raises:
            SettingsError: the present file is not a file of keys.
            OSError: the folder cannot be written.
        """
        with self._locked():
            exists = self.path.exists()
            keys = change(self.read() if exists else ())
            KeyRing(keys)
            document = _FileRecord(keys=[_record_of(key) for key in keys]).model_dump_json(
                indent=1, exclude_none=True
            )
            self._replace(f"{document}\n".encode(), former=self.path.stat() if exists else None)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The file itself cannot carry the lock: it is replaced.
        lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_CREAT | os.O_RDWR, _MODE)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _replace(self, content: bytes, *, former: os.stat_result | None) -> None:
        partial = self.path.with_name(f"{self.path.name}.partial")
        partial.unlink(missing_ok=True)
        try:
            with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _MODE), "wb") as file:
                if former is not None:
                    if (former.st_uid, former.st_gid) != (os.geteuid(), os.getegid()):
                        os.fchown(file.fileno(), former.st_uid, former.st_gid)
                    os.fchmod(file.fileno(), stat.S_IMODE(former.st_mode) & _KEPT_MODE_BITS | _MODE)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _key_of(record: _KeyRecord) -> ApiKey:
    return ApiKey(
        record.id,
        record.name,
        bytes.fromhex(record.hash.removeprefix("sha256:")),
        frozenset(record.scopes),
        created_at=record.created_at,
        expires_at=record.expires_at,
        revoked_at=record.revoked_at,
        limits=Limits(**record.limits.model_dump()),
    )


def _record_of(key: ApiKey) -> _KeyRecord:
    return _KeyRecord(
        id=key.id,
        name=key.name,
        hash=f"sha256:{key.digest.hex()}",
        scopes=sorted(key.scopes),
        created_at=key.created_at,
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        limits=_LimitsRecord(
            requests_per_second=key.limits.requests_per_second,
            characters_per_minute=key.limits.characters_per_minute,
            characters_per_day=key.limits.characters_per_day,
        ),
    )
