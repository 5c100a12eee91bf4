"""The settings that say who may use the service, read into what the web layer needs."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

import structlog

from app.api.authentication import AccessOptions
from app.errors import InvalidRequest, SettingsError
from app.keys import KeyFile, KeySource, Limits, Scope, keys_from_environment
from app.settings import PREFIX, Settings

_log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.serve")


def access_options(settings: Settings, addresses: Sequence[str]) -> AccessOptions:
    """Who may use a service that listens on these addresses.

    Without keys everybody may, and a warning is logged where others than this machine's own programs can
    connect. It is a warning and not a refusal because the address says little: in a container it is always
    0.0.0.0, however the port is published, and a flag that every container must set would go on opening the
    service after its keys have come.

    Raises:
        SettingsError: a file or a list of keys is wrong, or nobody could use the service.
    """
    listed = (
        *keys_from_environment(
            settings.api_keys.get_secret_value(),
            frozenset({Scope.TRANSLATE}),
            variable=f"{PREFIX}API_KEYS",
        ),
        *keys_from_environment(
            settings.admin_keys.get_secret_value(),
            frozenset({Scope.TRANSLATE, Scope.ADMIN}),
            variable=f"{PREFIX}ADMIN_KEYS",
        ),
    )
    keys = None
    if settings.keys_file or listed:
        keys = KeySource(listed, KeyFile(Path(settings.keys_file)) if settings.keys_file else None)
    if keys is None and settings.allow_anonymous == "false":
        raise SettingsError(
            f"{PREFIX}ALLOW_ANONYMOUS is false and there are no API keys, so nobody could use the service; "
            f"set {PREFIX}KEYS_FILE to a file made with `dragoman keys create`, or {PREFIX}API_KEYS"
        )
    allow_anonymous = keys is None if settings.allow_anonymous == "auto" else _is_true(settings)
    exposed = [address for address in addresses if not _is_loopback(address)]
    if keys is None and exposed and settings.allow_anonymous == "auto":
        _log.warning(
            "open_to_everybody",
            addresses=exposed,
            meaning="whoever can connect may translate; there are no API keys",
            remedy=f"make a key with `dragoman keys create` and set {PREFIX}KEYS_FILE, or set "
            f"{PREFIX}ALLOW_ANONYMOUS=true to say that this is meant",
        )
    if keys is not None:
        _log.info("keys_loaded", num_keys=len(keys.ring.keys), allow_anonymous=allow_anonymous)
    return AccessOptions(
        keys=keys,
        allow_anonymous=allow_anonymous,
        open_metrics=settings.open_metrics,
        anonymous_limits=_anonymous_limits(settings),
    )


def trusted_proxies(settings: Settings) -> list[str]:
    """Addresses and networks whose X-Forwarded-For is believed.

    Raises:
        SettingsError: one is neither. Trusting everybody would let each caller choose its own address.
    """
    named = [stripped for part in settings.trusted_proxies.split(",") if (stripped := part.strip())]
    for one in named:
        try:
            ipaddress.ip_network(one)
        except ValueError:
            raise SettingsError(
                f"{PREFIX}TRUSTED_PROXIES has {one!r}, which is no address and no network such as "
                "10.0.0.0/8; names and * are not taken"
            ) from None
    return named


def _is_true(settings: Settings) -> bool:
    return settings.allow_anonymous == "true"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _anonymous_limits(settings: Settings) -> Limits:
    try:
        return Limits(
            settings.anonymous_requests_per_second or None,
            settings.anonymous_characters_per_minute or None,
            settings.anonymous_characters_per_day or None,
        )
    except InvalidRequest as error:
        raise SettingsError(f"{PREFIX}ANONYMOUS_*: {error.message}") from None
