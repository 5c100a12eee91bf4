"""Keys of every kind, and a service that asks for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from app.api.authentication import AccessOptions
from app.keys import ApiKey, KeySource, NewKey, Scope, new_key

NOW = datetime.now(UTC)


def made(name: str = "someone", *scopes: Scope, expires_in_s: float | None = None) -> NewKey:
    expires_at = None if expires_in_s is None else NOW + timedelta(seconds=expires_in_s)
    return new_key(name, frozenset(scopes or [Scope.TRANSLATE]), created_at=NOW, expires_at=expires_at)


def source_of(*keys: NewKey) -> KeySource:
    return KeySource([one.key for one in keys])


GOOD = made("good")
ADMIN = made("ops", Scope.ADMIN)
EXPIRED = made("expired", expires_in_s=-1)
_TO_REVOKE = made("revoked")
REVOKED = NewKey(
    _TO_REVOKE.text,
    ApiKey(_TO_REVOKE.key.id, "revoked", _TO_REVOKE.key.digest, _TO_REVOKE.key.scopes, revoked_at=NOW),
)
LOCKED = AccessOptions(keys=source_of(GOOD, ADMIN, EXPIRED, REVOKED), allow_anonymous=False)
