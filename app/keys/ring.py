"""The keys that are known at one moment, found by what a caller presents."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from app.errors import InvalidRequest
from app.keys.key import ApiKey, digest_of

_NO_DIGEST = bytes(32)


class KeyRing:
    """An immutable index of keys by digest.

    Attributes:
        keys: in the order given.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Index `keys`.

        Raises:
            InvalidRequest: two keys have one id, or one digest.
        """
        self.keys = tuple(keys)
        self._by_digest = {key.digest: key for key in self.keys}
        if len({key.id for key in self.keys}) < len(self.keys):
            raise InvalidRequest("two API keys have the same id; revoke one and create it anew")
        if len(self._by_digest) < len(self.keys):
            raise InvalidRequest("the same API key is listed twice; remove one of the two")

    def find(self, presented: bytes) -> ApiKey | None:
        """The key that was presented, whether or not it still opens anything.

        What is looked up is the digest, which a caller cannot steer: how long the look-up takes says nothing
        about how near a guess came. The last comparison takes the same time for any two digests.
        """
        digest = digest_of(presented)
        key = self._by_digest.get(digest)
        is_equal = hmac.compare_digest(digest, _NO_DIGEST if key is None else key.digest)
        return key if is_equal else None
