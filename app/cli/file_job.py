"""A file's translation that survives interruption: OUTPUT.partial, and what it belongs to beside it."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from app.cli.lines import LineDecoder, lines_of_file
from app.errors import InvalidOption

_SYNC_EVERY_S = 5.0
_CHUNK_BYTES = 1024 * 1024


class JobIdentity(BaseModel):
    """What a partial output belongs to; resuming under any other identity is refused.

    Attributes:
        input_sha256: hex digest of the input's bytes.
        input_bytes: its size.
        encoding: how it is read.
        source: source code.
        target: target code.
        model: bundle id.
        manifest_sha256: digest of the bundle's manifest, which holds the digests of all its files.
        variant: which graphs.
        use_shortlist: whether the output was restricted to a shortlist.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input_sha256: str
    input_bytes: int
    encoding: str
    source: str
    target: str
    model: str
    manifest_sha256: str
    variant: str
    use_shortlist: bool


@dataclass(frozen=True)
class InputFacts:
    """What one pass over an input finds.

    Attributes:
        sha256: hex digest.
        num_bytes: size.
        num_lines: lines, an unfinished last one included.
    """

    sha256: str
    num_bytes: int
    num_lines: int


def inspect_input(path: Path, decoder: LineDecoder) -> InputFacts:
    """Read an input once, so that a fault in its last line shows before hours of work and not after.

    Raises:
        InvalidRequest: a line is not of the encoding.
        RequestTooLarge: a line is too long.
    """
    digest = hashlib.sha256()
    num_lines = num_bytes = 0
    for line in lines_of_file(path):
        decoder.decode(line)
        digest.update(line.content)
        digest.update(line.ending)
        num_bytes += len(line.content) + len(line.ending)
        num_lines = line.number
    return InputFacts(digest.hexdigest(), num_bytes, num_lines)


class PartialOutput:
    """OUTPUT.partial and OUTPUT.partial.json, until `finish` renames the former to OUTPUT.

    Use as a context manager: leaving it by any way flushes what is written to the disk.

    Attributes:
        num_done: complete lines that were there already.
    """

    def __init__(self, output: Path, identity: JobIdentity, *, resume: bool, force: bool) -> None:
        """Open or create the partial output.

        Args:
            output: where the finished translation will lie.
            identity: of this job.
            resume: go on with an existing partial output of the same identity.
            force: write over an existing output; without `resume`, over a partial one too.

        Raises:
            InvalidOption: the folder is missing, a file is in the way, or the partial output belongs to
                another job.
        """
        self._output = output
        self.partial = output.with_name(f"{output.name}.partial")
        self._facts = output.with_name(f"{output.name}.partial.json")
        if not output.parent.is_dir():
            raise InvalidOption(f"{output.parent} is not a folder; make it, or name another output")
        if output.exists() and not force:
            raise InvalidOption(f"{output} exists; name another file, or pass --force to replace it")
        if self.partial.exists() and not (resume or force):
            raise InvalidOption(
                f"{self.partial} is left from an interrupted run; pass --resume to go on with it, "
                "or --force to start again"
            )
        self.num_done = 0
        if resume and self.partial.exists():
            self._check_identity(identity)
            self.num_done, size = _complete_lines(self.partial)
            self._file: BinaryIO = self.partial.open("r+b")
            self._file.truncate(size)
            self._file.seek(size)
        else:
            self._facts.write_text(identity.model_dump_json(indent=2) + "\n", encoding="utf-8")
            self._file = self.partial.open("wb")
        self._synced_at_s = time.monotonic()

    def __enter__(self) -> PartialOutput:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Make what is written durable and close."""
        if not self._file.closed:
            self._sync()
            self._file.close()

    def write(self, line: bytes) -> None:
        """Append one line, its ending included; every few seconds to the disk."""
        self._file.write(line)
        if time.monotonic() - self._synced_at_s >= _SYNC_EVERY_S:
            self._sync()

    def finish(self) -> None:
        """Rename the complete output to its name."""
        self._sync()
        self._file.close()
        self.partial.replace(self._output)
        self._facts.unlink(missing_ok=True)

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced_at_s = time.monotonic()

    def _check_identity(self, identity: JobIdentity) -> None:
        try:
            found = JobIdentity.model_validate_json(self._facts.read_bytes())
        except (FileNotFoundError, ValidationError):
            raise InvalidOption(
                f"{self._facts} is missing or damaged, so {self.partial} cannot be matched to its input; "
                "pass --force without --resume to start again"
            ) from None
        mine, theirs = identity.model_dump(), found.model_dump()
        differing = [name for name in mine if mine[name] != theirs[name]]
        if differing:
            raise InvalidOption(
                f"{self.partial} was made with another {' and another '.join(differing)}; restore that, "
                "or pass --force without --resume to start again"
            )


def _complete_lines(path: Path) -> tuple[int, int]:
    """Number of complete lines and the offset where the last of them ends."""
    num_lines = end = offset = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            num_lines += chunk.count(b"\n")
            if (last := chunk.rfind(b"\n")) >= 0:
                end = offset + last + 1
            offset += len(chunk)
    return num_lines, end
