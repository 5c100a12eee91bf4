"""The service's address, taken before minutes of work instead of after them."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from app.errors import DragomanError

BACKLOG = 2048
"""Clients that may wait to be accepted."""
_STALLED_READER_MS = 60_000
"""Milliseconds in which a client takes nothing of an answer, or acknowledges nothing, and is given up."""
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class AddressUnavailable(DragomanError):
    """The service cannot listen where it was told to."""

    code = "address_unavailable"


class Listeners:
    """The sockets of one host and port, bound but not yet listening.

    A name such as ``localhost`` may stand for several addresses; all of them share one port.

    Attributes:
        url: where clients find the service.
        sockets: to be handed to the server, which closes them.
    """

    def __init__(self, host: str, port: int) -> None:
        """Bind the address; another process that listens there is found now.

        Args:
            host: a name or an address.
            port: TCP port; 0 lets the system choose.

        Raises:
            AddressUnavailable: it is taken, not of this machine, or not allowed.
        """
        self._host = host
        self._port = port
        self.sockets: list[socket.socket] = []
        absent: OSError | None = None
        for family, address in self._addresses():
            try:
                self._bind(family, address)
            except OSError as error:
                if error.errno in _NOT_HERE:
                    # A name may also stand for an address of a protocol that this machine has not got.
                    absent = error
                    continue
                self.close()
                raise self._explained(error) from None
        if not self.sockets:
            raise self._explained(absent or OSError(errno.EADDRNOTAVAIL, "no address")) from None
        self.url = f"http://{_bracketed(host)}:{self._port}"

    def listen(self) -> None:
        """Let clients connect.

        Raises:
            AddressUnavailable: another process began to listen since.
        """
        for bound in self.sockets:
            try:
                bound.listen(BACKLOG)
            except OSError as error:
                self.close()
                raise self._explained(error) from None

    def close(self) -> None:
        """Give the address back."""
        for bound in self.sockets:
            bound.close()
        self.sockets.clear()

    def _addresses(self) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
        try:
            infos = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (socket.gaierror, UnicodeError):
            raise AddressUnavailable(
                f"{self._host} is no address and no name that is known here; choose another with --host"
            ) from None
        # The same address may be listed more than once.
        return list(dict.fromkeys((info[0], info[4]) for info in infos))

    def _bind(self, family: socket.AddressFamily, address: tuple[Any, ...]) -> None:
        # The protocol is named because asyncio turns Nagle's algorithm off only where it is; with it on,
        # an answer's body waits for the client's delayed acknowledgement of the headers, 40 ms.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            # Connections of the process before, still in TIME_WAIT, must not keep this one from starting.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit both. The server closes a connection only once all is written, so without
            # the first, clients that do not read, or are gone without a word, would hold theirs for ever.
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_READER_MS)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((address[0], self._port, *address[2:]))
        except OSError:
            bound.close()
            raise
        self._port = bound.getsockname()[1]
        self.sockets.append(bound)

    def _explained(self, error: OSError) -> AddressUnavailable:
        place = f"{_bracketed(self._host)}:{self._port}"
        if error.errno == errno.EADDRINUSE:
            return AddressUnavailable(f"{place} is taken; choose another with --port")
        if error.errno in _NOT_HERE:
            return AddressUnavailable(
                f"{self._host} is not an address of this machine; choose another with --host"
            )
        if error.errno in (errno.EACCES, errno.EPERM):
            return AddressUnavailable(f"{place} needs privileges; choose a port from 1024 with --port")
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        return AddressUnavailable(f"{place}: {reason}; choose another with --host and --port")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
