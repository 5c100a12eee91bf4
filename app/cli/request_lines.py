"""Request lines that RFC 9112 has servers accept, and that h11 leaves to them."""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv6Address
from urllib.parse import unquote

import h11

_ABSOLUTE_FORM = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|((?:[^%:\[\]]|%[0-9A-Fa-f]{2})+))(?::0*([0-9]{0,5}))?")
_NAME = re.compile(r"[-.0-9A-Z_a-z~!$&'()*+,;=\u00a0-\U0010ffff]+")
"""RFC 3986's reg-name once decoded: unreserved, sub-delims, and what only percent signs can write."""
_MAX_PORT = 65_535


class LenientConnection(h11.Connection):
    """Reads an empty line before a request, and a target that names this service's host.

    Section 2.2: "a server that is expecting to receive and parse a request-line SHOULD ignore at least one
    empty line"; old clients send one behind a body. Section 3.2.2: a server must accept the absolute form, as
    ``GET http://host/path HTTP/1.1``, though clients send it to proxies alone.
    """

    _has_ignored_line = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's, with every target in origin form.

        Raises:
            h11.RemoteProtocolError: no HTTP, or a target whose host or port is none (RFC 9112, section 3.2),
                or with credentials or a fragment in it.
        """
        if self.their_state is h11.IDLE and not self._has_ignored_line:
            if (start := self.trailing_data[0][:2]) == b"\r":
                return h11.NEED_DATA
            if start[:1] == b"\n" or start == b"\r\n":
                self._receive_buffer.maybe_extract_at_most(start.index(b"\n") + 1)
                self._has_ignored_line = True
        is_head = self.their_state is h11.IDLE
        try:
            return super().next_event()
        except h11.RemoteProtocolError:
            if is_head:
                # A connection's later heads are refused as its first is, without chunks.
                self.their_http_version = None
            raise

    def _extract_next_receive_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Refuse a target before h11 takes note of the request, whose HEAD would forbid the answer's body."""
        event = super()._extract_next_receive_event()
        if isinstance(event, h11.Request):
            self._has_ignored_line = False
            if not event.target.startswith(b"/"):
                return _in_origin_form(event)
        return event


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with its target's host as its Host header, whatever that was; other forms as they are."""
    found = _ABSOLUTE_FORM.fullmatch(request.target.decode("ascii"))
    if found is None:
        return request
    host, target = found.groups()
    if not _is_host_and_port(host) or "#" in target:
        raise h11.RemoteProtocolError("no host or port in the target, or credentials or a fragment")
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        target=target if target.startswith("/") else "/" + target,
        headers=[(b"host", host.encode("ascii")), *others],
        http_version=request.http_version,
    )


def _is_host_and_port(authority: str) -> bool:
    """Whether this is a host and perhaps a port, by RFC 3986, sections 3.2.2 and 3.2.3.

    An IPv4 address is a name like others there. Stricter than its grammar: octets behind percent signs have
    to be UTF-8 and may hide neither delimiters nor controls; no address of a future IP, whose meaning nobody
    knows.
    """
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return False
    address, name, port = found.groups()
    if port and int(port) > _MAX_PORT:
        return False
    if address is None:
        try:
            return _NAME.fullmatch(unquote(name, errors="strict")) is not None
        except UnicodeDecodeError:
            return False
    try:
        IPv6Address(address)
    except AddressValueError:
        return False
    return True
