"""The clients of a soak test: so many connections at a time, and what became of every request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak_requests import NATIVE, SoakRequest

_ANSWER_LIMIT_S = 120.0
"""A request that has no answer after so long counts as lost."""
_MAX_NAMED = 20
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close\r\n", re.IGNORECASE)
_END_OF_HEAD = b"\r\n\r\n"

Question = tuple[str, str, str]
"""Pair, options and text."""


@dataclass
class Account:
    """What was sent and what came of it.

    Attributes:
        sent: requests by kind.
        answered: answers by path and status.
        left: requests by path whose client left before it read the answer.
        lost: what befell requests that got no whole answer, the first of them.
        num_lost: how many those are.
        wrong: answers that were not right, the first of them.
        num_wrong: how many those are.
        num_unequal: answers that differ from an earlier one to the same question.
        num_compared: answers to questions that had been asked before.
        num_segments_answered: segments of answers that the service may keep.
        num_segments_sent: the same of everything that was sent.
    """

    sent: Counter[str] = field(default_factory=Counter)
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    num_lost: int = 0
    wrong: list[str] = field(default_factory=list)
    num_wrong: int = 0
    num_unequal: int = 0
    num_compared: int = 0
    num_segments_answered: int = 0
    num_segments_sent: int = 0
    _answers: dict[bytes, bytes] = field(default_factory=dict)

    def note_lost(self, request: SoakRequest, what: str) -> None:
        """A request got no whole answer."""
        self.num_lost += 1
        if len(self.lost) < _MAX_NAMED:
            self.lost.append(f"{request.kind}: {what}")

    def note_answer(self, request: SoakRequest, status: int, body: bytes) -> None:
        """A request got an answer; look whether it is a right one."""
        self.answered[request.path, status] += 1
        fault = self._fault_of(request, status, body)
        if fault is not None:
            self.num_wrong += 1
            if len(self.wrong) < _MAX_NAMED:
                self.wrong.append(f"{request.kind}: {fault}")

    def _fault_of(self, request: SoakRequest, status: int, body: bytes) -> str | None:
        if status not in request.statuses:
            return f"status {status} instead of {sorted(request.statuses)}: {body[:200]!r}"
        if request.path == "/docs":
            return None
        try:
            answer = json.loads(body)
        except ValueError:
            return f"status {status} with a body that is not JSON"
        if status != 200:
            return None if "error" in answer else f"status {status} without an error"
        if not request.pair:
            return None
        found = translations_of(request.path, answer)
        if len(found) != len(request.texts):
            return f"{len(found)} translations of {len(request.texts)} texts"
        self.num_segments_answered += request.num_segments
        unequal = [
            text
            for text, translation in zip(request.texts, found, strict=True)
            if not self._is_equal((request.pair, request.options, text), translation)
        ]
        self.num_unequal += len(unequal)
        # The soak test's own texts, which are nobody's secret.
        return f"another translation than before ({request.options}) of {unequal[0]!r}" if unequal else None

    def _is_equal(self, question: Question, translation: str) -> bool:
        key = hashlib.blake2b(json.dumps(question).encode(), digest_size=12).digest()
        digest = hashlib.blake2b(translation.encode(), digest_size=12).digest()
        earlier = self._answers.setdefault(key, digest)
        self.num_compared += earlier is not digest
        return earlier == digest


def translations_of(path: str, answer: Any) -> list[str]:
    """The translations of an answer in either dialect, best ones only."""
    if path == NATIVE:
        return [text["text"] for text in answer["texts"]]
    translated = answer["translatedText"]
    return [translated] if isinstance(translated, str) else translated


async def run_clients(
    port: int,
    requests: Iterator[SoakRequest],
    *,
    num_clients: int,
    account: Account,
    on_done: Callable[[], None],
) -> None:
    """Send all requests, each client its next one when it is done with the last.

    Args:
        port: of the service on this machine.
        requests: what to send.
        num_clients: connections at a time.
        account: what becomes of them.
        on_done: called after each request.
    """

    async def one_client() -> None:
        connection = _Connection(port)
        try:
            for request in requests:
                account.sent[request.kind] += 1
                account.num_segments_sent += request.num_segments
                await _ask(connection, request, account)
                on_done()
        finally:
            connection.close()

    async with asyncio.TaskGroup() as clients:
        for _ in range(num_clients):
            clients.create_task(one_client())


async def _ask(connection: _Connection, request: SoakRequest, account: Account) -> None:
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            await connection.send(request)
            if request.leaves_after_s is not None:
                account.left[request.path] += 1
                await asyncio.sleep(request.leaves_after_s)
                connection.close()
                return
            status, body = await connection.receive()
    except (OSError, EOFError, TimeoutError) as error:
        # EOFError: asyncio's IncompleteReadError is one.
        connection.close()
        account.note_lost(request, f"{type(error).__name__}: {error}")
        return
    account.note_answer(request, status, body)


class _Connection:
    """One keep-alive connection, opened again when the service or a leaving client has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: SoakRequest) -> None:
        if self._streams is not None and self._streams[0].at_eof():
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        _, writer = self._streams
        head = [f"{request.method} {request.path} HTTP/1.1", "Host: 127.0.0.1"]
        head += [f"{name}: {value}" for name, value in request.headers]
        head += [f"Content-Length: {len(request.body)}", "", ""]
        # Not drained: a service may refuse a body before it has read it, and then the answer must be read.
        writer.write("\r\n".join(head).encode("ascii") + request.body)

    async def receive(self) -> tuple[int, bytes]:
        assert self._streams is not None
        reader, _ = self._streams
        head = await reader.readuntil(_END_OF_HEAD)
        length = _LENGTH.search(head)
        if length is None:
            raise EOFError("an answer without Content-Length")
        body = await reader.readexactly(int(length[1]))
        if _CLOSES.search(head):
            self.close()
        return int(head[9:12]), body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
