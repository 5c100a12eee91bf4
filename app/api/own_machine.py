"""Whether a request comes from a program on the service's own machine."""

from __future__ import annotations

import ipaddress

from starlette.types import Scope

_SIGNS_OF_OTHERS = frozenset(
    {b"origin", b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"}
)
"""Browsers send the first with every POST, whichever page has them do it; proxies send the others."""


def is_from_own_machine(scope: Scope) -> bool:
    """Whether the caller connected over loopback, and speaks for nobody else as far as its headers say."""
    if any(name in _SIGNS_OF_OTHERS for name, _ in scope["headers"]):
        return False
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0] if client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
