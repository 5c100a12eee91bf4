"""One API key: what is kept of it, and how a new one is made.

Only the SHA-256 digest of a key is ever kept. A slow password hash would protect nothing here: it makes
guessing a *guessable* secret dear, and 256 random bits are not guessed at any speed; but it would cost tens
of milliseconds per request. For the same reason there is no salt and no second secret in the hash.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from app.errors import InvalidRequest

MAX_LIMIT = 1_000_000_000_000
MAX_NAME_CHARACTERS = 64
_PREFIX = "dragoman"
_SECRET_BYTES = 32
_ID_BYTES = 4
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)


class Scope(StrEnum):
    """What a key opens."""

    TRANSLATE = "translate"
    """Everything that translates or says what can be translated."""
    ADMIN = "admin"
    """What operators see and do: the metrics, the reload."""


@dataclass(frozen=True)
class Limits:
    """How much one caller may ask for; None is no limit.

    Attributes:
        requests_per_second: requests; as many may come at once after a second of silence.
        characters_per_minute: characters of source text, refilled steadily.
        characters_per_day: characters of source text from one midnight UTC to the next.
    """

    requests_per_second: int | None = None
    characters_per_minute: int | None = None
    characters_per_day: int | None = None

    def __post_init__(self) -> None:
        """Refuse limits that let nothing through."""
        for name in ("requests_per_second", "characters_per_minute", "characters_per_day"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_LIMIT:
                raise InvalidRequest(
                    f"{name} is {value}, it must be from 1 to {MAX_LIMIT}; leave it out for no limit"
                )

    @property
    def any_set(self) -> bool:
        """Whether there is any limit at all."""
        return self != NO_LIMITS


NO_LIMITS = Limits()


@dataclass(frozen=True)
class ApiKey:
    """What is kept of a key; the key itself is not.

    Attributes:
        id: public name for commands and lists; part of the key's text.
        name: who or what uses it, for people.
        digest: SHA-256 of the key's bytes, 32 bytes.
        scopes: what it opens.
        created_at: when it was made, with a time zone; None if unknown.
        expires_at: from when on it opens nothing, with a time zone; None is never.
        revoked_at: when it was revoked; None if it was not.
        limits: how much its holder may ask for.
    """

    id: str
    name: str
    digest: bytes = field(repr=False)
    scopes: frozenset[Scope]
    created_at: datetime | None = None
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    limits: Limits = NO_LIMITS

    def __post_init__(self) -> None:
        """Refuse what could not be listed, found or compared."""
        if not _ID.fullmatch(self.id):
            raise InvalidRequest("a key's id has 1 to 64 letters, digits, dots, dashes or underscores")
        if not (self.name.strip() and self.name.isprintable() and len(self.name) <= MAX_NAME_CHARACTERS):
            raise InvalidRequest(f"a key's name has 1 to {MAX_NAME_CHARACTERS} printable characters")
        if len(self.digest) != hashlib.sha256().digest_size:
            raise InvalidRequest("a key's SHA-256 digest has 32 bytes; make the key anew")
        if not self.scopes:
            raise InvalidRequest("a key needs a scope: translate, admin or both")
        for moment in (self.created_at, self.expires_at, self.revoked_at):
            if moment is not None and moment.tzinfo is None:
                raise InvalidRequest("a key's times need a time zone; write them as 2027-01-31T00:00:00Z")

    def opens(self, scope: Scope, now: datetime) -> bool:
        """Whether it opens what needs `scope` at this moment; every reason is looked at every time."""
        in_time = self.expires_at is None or now < self.expires_at
        return in_time & (self.revoked_at is None) & (scope in self.scopes)


@dataclass(frozen=True)
class NewKey:
    """A key that was just made.

    Attributes:
        text: the key itself, to be shown once and never kept.
        key: what is kept.
    """

    text: str = field(repr=False)
    key: ApiKey


def digest_of(presented: bytes) -> bytes:
    """The digest under which a presented key would be kept; 32 bytes."""
    return hashlib.sha256(presented).digest()


def new_key(
    name: str,
    scopes: frozenset[Scope],
    *,
    created_at: datetime,
    expires_at: datetime | None = None,
    limits: Limits = NO_LIMITS,
) -> NewKey:
    """Make a key of 256 random bits.

    Raises:
        InvalidRequest: the name, the scopes or a time is not usable.
    """
    key_id = secrets.token_hex(_ID_BYTES)
    # The prefix lets scanners for leaked secrets find it; the id tells which one to revoke.
    text = f"{_PREFIX}_{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return NewKey(
        text,
        ApiKey(
            key_id,
            name,
            digest_of(text.encode()),
            scopes,
            created_at=created_at,
            expires_at=expires_at,
            limits=limits,
        ),
    )
