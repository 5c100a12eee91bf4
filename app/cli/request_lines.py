"""Request lines that RFC 9112 has servers accept, and that h11 leaves to them."""

from __future__ import annotations

import re

import h11

_ABSOLUTE_FORM = re.compile(rb"https?://([^/?#]*)([^#]*)", re.IGNORECASE)


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
            h11.RemoteProtocolError: no HTTP, or a target without a host or with credentials in it.
        """
        if self.their_state is h11.IDLE and not self._has_ignored_line:
            if (start := self.trailing_data[0][:2]) == b"\r":
                return h11.NEED_DATA
            if start[:1] == b"\n" or start == b"\r\n":
                self._receive_buffer.maybe_extract_at_most(start.index(b"\n") + 1)
                self._has_ignored_line = True
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._has_ignored_line = False
            if not event.target.startswith(b"/"):
                return _in_origin_form(event)
        return event


def _in_origin_form(request: h11.Request) -> h11.Request:
    """The request with its target's host as its Host header, whatever that was; other forms as they are."""
    found = _ABSOLUTE_FORM.fullmatch(request.target)
    if found is None:
        return request
    host, target = found.groups()
    if not host or b"@" in host:
        raise h11.RemoteProtocolError("the target has no host, or credentials beside it")
    return h11.Request(
        method=request.method,
        target=target if target.startswith(b"/") else b"/" + target,
        headers=[(b"host", host), *((name, value) for name, value in request.headers if name != b"host")],
        http_version=request.http_version,
    )
