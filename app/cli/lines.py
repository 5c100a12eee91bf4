"""Lines of files and pipes, byte for byte: only LF and CRLF end a line."""

from __future__ import annotations

import asyncio
import codecs
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from app.errors import InvalidOption, InvalidRequest, RequestTooLarge

MAX_LINE_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True)
class Line:
    """One line.

    Attributes:
        number: from 1.
        content: without its ending.
        ending: LF, CRLF, or nothing on an unfinished last line.
    """

    number: int
    content: bytes
    ending: bytes


class LineSplitter:
    """Splits chunks of bytes into lines."""

    def __init__(self) -> None:
        """Begin at line 1."""
        self._pending: list[bytes] = []
        self._num_pending_bytes = 0
        self._number = 0

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """The lines that end in this chunk.

        Raises:
            RequestTooLarge: a line exceeds `MAX_LINE_BYTES`.
        """
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            self._pending.append(chunk[start:end])
            yield self._line(b"\n")
            start = end + 1
        if start < len(chunk):
            self._pending.append(chunk[start:])
            self._num_pending_bytes += len(chunk) - start
            if self._num_pending_bytes > MAX_LINE_BYTES:
                raise RequestTooLarge(
                    f"line {self._number + 1} has more than {MAX_LINE_BYTES} bytes, the limit; break it up"
                )

    def finish(self) -> Iterator[Line]:
        """The last line, if it lacks an ending."""
        if self._pending:
            yield self._line(b"")

    def _line(self, ending: bytes) -> Line:
        content = b"".join(self._pending)
        self._pending.clear()
        self._num_pending_bytes = 0
        self._number += 1
        if ending and content.endswith(b"\r"):
            content, ending = content[:-1], b"\r\n"
        return Line(self._number, content, ending)


def lines_of_file(path: Path) -> Iterator[Line]:
    """All lines of a file, read in chunks."""
    splitter = LineSplitter()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield from splitter.feed(chunk)
    yield from splitter.finish()


async def lines_of_descriptor(descriptor: int) -> AsyncIterator[Line]:
    """All lines of an open descriptor as they come; waiting for them does not block the loop."""
    splitter = LineSplitter()
    while chunk := await _read_when_ready(descriptor):
        for line in splitter.feed(chunk):
            yield line
    for line in splitter.finish():
        yield line


async def _read_when_ready(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except PermissionError:
        # Regular files cannot be waited for; they are always ready.
        return os.read(descriptor, _CHUNK_BYTES)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
    return os.read(descriptor, _CHUNK_BYTES)


class LineDecoder:
    """Turns lines' bytes into text, strictly.

    Args:
        encoding: a codec's name; it must write ASCII as ASCII does, since lines are split as bytes.

    Raises:
        InvalidOption: the codec is unknown or does not.
    """

    def __init__(self, encoding: str) -> None:
        """Check the codec."""
        try:
            self.name = codecs.lookup(encoding).name
            is_ascii_compatible = "a\r\n".encode(encoding) == b"a\r\n"
        except (LookupError, UnicodeError):
            # Some codecs exist to refuse all text, such as Python's "undefined".
            raise InvalidOption(f"{encoding} is not a known encoding; try utf-8 or latin-1") from None
        if not is_ascii_compatible:
            raise InvalidOption(
                f"{encoding} does not write line ends as ASCII does; convert the file to UTF-8 first, "
                f"for instance with iconv -f {encoding} -t utf-8"
            )

    def decode(self, line: Line) -> str:
        """A line's text.

        Raises:
            InvalidRequest: the bytes are not of this encoding; the message names the line.
        """
        try:
            return line.content.decode(self.name)
        except UnicodeError as error:
            where = f" (byte {error.start + 1} of the line)" if isinstance(error, UnicodeDecodeError) else ""
            raise InvalidRequest(
                f"line {line.number} is not valid {self.name}{where}; "
                "mend it, or name the file's encoding, for instance --encoding latin-1"
            ) from None
