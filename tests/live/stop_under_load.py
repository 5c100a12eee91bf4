"""Clients that keep asking while the service is stopped, and what became of every single request.

A request is *lost* when it was sent and neither answered nor refused in so many words. One whose connection
was refused, or found closed before anything was sent on it, was never sent.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ANSWERED, REFUSED, NOT_SENT, LOST, WRONG = "answered", "refused", "not sent", "lost", "wrong"
_REFUSALS = frozenset({"shutting_down", "queue_full"})


@dataclass
class Load:
    """What is asked, by how many clients at a time, and what came of it.

    Attributes:
        port: of the service on this machine.
        expected: the right translation of every text that is asked.
        num_clients: connections at a time, each kept open as long as the service allows.
        outcomes: how many requests ended how.
        details: of those that were lost or wrong.
    """

    port: int
    expected: Mapping[str, str]
    num_clients: int
    outcomes: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    @property
    def num_sent(self) -> int:
        """Requests that left a client."""
        return sum(self.outcomes[outcome] for outcome in (ANSWERED, REFUSED, LOST, WRONG))

    async def run(self, num_requests: int, *, at: int, stop: Callable[[], None]) -> None:
        """Send that many requests, and call `stop` once `at` of them have ended; go on all the same."""
        texts = list(self.expected)
        numbers = iter(range(num_requests))
        stopped = False

        async def client() -> None:
            nonlocal stopped
            connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
            for number in numbers:
                outcome, connection = await self._ask(texts[number % len(texts)], connection)
                self.outcomes[outcome] += 1
                if not stopped and self.outcomes.total() >= at:
                    stopped = True
                    stop()
            if connection is not None:
                connection[1].close()

        await asyncio.gather(*(client() for _ in range(self.num_clients)))

    async def _ask(
        self, text: str, connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None
    ) -> tuple[str, tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]:
        if connection is not None and connection[0].at_eof():
            connection[1].close()
            connection = None
        if connection is None:
            try:
                connection = await asyncio.open_connection("127.0.0.1", self.port)
            except ConnectionRefusedError:
                return NOT_SENT, None
        reader, writer = connection
        body = json.dumps({"texts": [text], "source": "en", "target": "pt"}).encode()
        began_s = time.monotonic()
        writer.write(
            b"POST /v1/translate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.partition("\r\ncontent-length: ")[2].partition("\r\n")[0])
            answer = json.loads(await reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            self.details.append(f"{type(error).__name__} after {time.monotonic() - began_s:.3f} s")
            writer.close()
            return LOST, None
        if "\r\nconnection: close\r\n" in head:
            writer.close()
            connection = None
        return self._judge(text, int(head.split()[1]), answer), connection

    def _judge(self, text: str, status: int, answer: Any) -> str:
        if status == 200 and answer["texts"][0]["text"] == self.expected[text]:
            return ANSWERED
        if status in (429, 503) and answer["error"]["code"] in _REFUSALS:
            return REFUSED
        self.details.append(f"{status}: {str(answer)[:200]}")
        return WRONG
