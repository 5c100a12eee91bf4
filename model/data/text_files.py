"""Lines of text files, plain or compressed, and files that appear complete or not at all.

Plain, gzip (``.gz``) and zstd (``.zst``) files are read as streams, so their size does not matter.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, cast

from app.errors import InvalidOption

# Is told how many bytes of files, as they lie on the disk, and how many lines were read since the last call.
OnRead = Callable[[int, int], None]
_LINES_BETWEEN_REPORTS = 1024


def lines_of(path: Path, *, on_read: OnRead | None = None) -> Iterator[str]:
    """The lines without their ends, which are LF or CR LF; no other character ends a line.

    Args:
        path: the file.
        on_read: is told of the progress now and then, and at the end.

    Raises:
        InvalidOption: the file is missing, damaged or not UTF-8. The message names the file and the line,
            never its text.
    """
    number = 0
    try:
        with path.open("rb") as stored, _unpacked(stored, path) as file:
            num_bytes = num_lines = 0
            for raw in file:
                number += 1
                # A mark at the start of the file says that it is UTF-8, and is no text.
                encoding = "utf-8-sig" if number == 1 else "utf-8"
                yield raw.rstrip(b"\n").rstrip(b"\r").decode(encoding)
                if on_read is not None and number % _LINES_BETWEEN_REPORTS == 0:
                    on_read(stored.tell() - num_bytes, number - num_lines)
                    num_bytes, num_lines = stored.tell(), number
            if on_read is not None:
                on_read(path.stat().st_size - num_bytes, number - num_lines)
    except UnicodeDecodeError as error:
        # Not chained: that error carries the text.
        raise InvalidOption(
            f"{path}, line {number}: byte {error.start + 1} is not UTF-8; convert the file to UTF-8"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidOption(
            f"{path} cannot be read after line {number}: the compressed data is damaged or cut short; "
            "fetch the file again"
        ) from error
    except OSError as error:
        place = f" after line {number}" if number else ""
        raise InvalidOption(f"{path} cannot be read{place}: {error.strerror}") from error


def check_new(paths: Sequence[Path], *, force: bool) -> None:
    """Refuse to write where something is, or where no folder is.

    Args:
        paths: the files to be written.
        force: replace existing files.

    Raises:
        InvalidOption: a file exists and `force` is not set, its folder is missing, or two are the same.
    """
    if len(set(paths)) < len(paths):
        raise InvalidOption(f"of {', '.join(map(str, paths))} two are the same file; name different ones")
    for path in paths:
        if path.is_dir():
            raise InvalidOption(f"{path} is a folder; name a file in it")
        if path.exists() and not force:
            raise InvalidOption(f"{path} exists; name another file, or replace it with --force")
        if not path.parent.is_dir():
            raise InvalidOption(f"the folder {path.parent} does not exist; make it first")


@contextmanager
def written_lines(*paths: Path) -> Iterator[tuple[IO[str], ...]]:
    """Files that are open for writing, under other names until all of them are complete.

    An error leaves what was there before, and no part of a new file.

    Args:
        paths: where they are to lie; existing files are replaced at the end.
    """
    partials = [path.with_name(f"{path.name}.partial") for path in paths]
    try:
        with ExitStack() as stack:
            yield tuple(
                stack.enter_context(partial.open("w", encoding="utf-8", newline="\n")) for partial in partials
            )
        for partial, path in zip(partials, paths, strict=True):
            partial.replace(path)
    finally:
        for partial in partials:
            partial.unlink(missing_ok=True)


@contextmanager
def _unpacked(stored: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(stored, "rb") as file:
            yield cast(IO[bytes], file)
    elif path.suffix == ".zst":
        zstd = _zstd(path)
        try:
            with zstd.open(stored, "rb") as file:
                yield file
        except zstd.ZstdError as error:
            raise EOFError(str(error)) from error
    else:
        yield stored


def _zstd(path: Path) -> ModuleType:
    """The standard library's module, or before Python 3.14 its backport."""
    try:
        if sys.version_info >= (3, 14):
            import compression.zstd as zstd
        else:
            import backports.zstd as zstd
    except ModuleNotFoundError as error:
        raise InvalidOption(
            f"reading {path.name} needs the library backports.zstd, which is not installed; "
            "`pip install backports.zstd`, or unpack the file with `zstd -d`"
        ) from error
    return zstd
