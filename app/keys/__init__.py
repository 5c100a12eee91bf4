"""API keys: what one is, where they are kept, and how one is found by what a caller presents."""

from app.keys.file import KeyFile
from app.keys.key import NO_LIMITS, ApiKey, Limits, NewKey, Scope, digest_of, new_key
from app.keys.ring import KeyRing
from app.keys.source import KeySource, keys_from_environment

__all__ = [
    "NO_LIMITS",
    "ApiKey",
    "KeyFile",
    "KeyRing",
    "KeySource",
    "Limits",
    "NewKey",
    "Scope",
    "digest_of",
    "keys_from_environment",
    "new_key",
]
