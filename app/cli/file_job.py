"""A file's translation that survives interruption: OUTPUT.partial, and what it belongs to beside it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, ValidationError

from app.cli.lines import Line, LineDecoder, lines_of_file
from app.cli.output_place import OutputPlace
from app.errors import InvalidOption, InvalidRequest

_SYNC_EVERY_S = 5.0
_CHUNK_BYTES = 1024 * 1024
_BLOCK_BYTES = 256 * 1024


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
        variant: which graphs ran, whatever was asked for.
        use_shortlist: whether the output was restricted to a shortlist.
        beam_size: live beams; 1, greedy search, where it is not said.
        length_penalty: exponent of the score's length normalisation.
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
    beam_size: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True)
class InputFacts:
    """What one pass over an input finds.

    Attributes:
        sha256: hex digest.
        num_bytes: size.
        num_lines: lines, an unfinished last one included.
        block_digests: one for each block of lines, by which a later pass knows the same lines again.
    """

    sha256: str
    num_bytes: int
    num_lines: int
    block_digests: tuple[bytes, ...]


def inspect_input(path: Path, decoder: LineDecoder) -> InputFacts:
    """Read an input once, so that a fault in its last line shows before hours of work and not after.

    Raises:
        InvalidRequest: a line is not of the encoding.
        RequestTooLarge: a line is too long.
    """
    whole = hashlib.sha256()
    num_lines = num_bytes = 0
    block_digests = []
    for block in _blocks_of(path):
        for line in block:
            decoder.decode(line)
        content = _bytes_of(block)
        whole.update(content)
        block_digests.append(hashlib.sha256(content).digest())
        num_bytes += len(content)
        num_lines = block[-1].number
    return InputFacts(whole.hexdigest(), num_bytes, num_lines, tuple(block_digests))


def inspected_lines(path: Path, facts: InputFacts) -> Iterator[Line]:
    """The lines once more, each known to be the one that was inspected.

    A block is checked before its first line is handed out, so no line of a changed input gets translated,
    and a partial output can be resumed once the input is restored.

    Raises:
        InvalidRequest: the input is another now.
    """
    num_blocks = 0
    num_lines = 0
    for block in _blocks_of(path):
        expected = facts.block_digests[num_blocks] if num_blocks < len(facts.block_digests) else None
        if hashlib.sha256(_bytes_of(block)).digest() != expected:
            raise _changed(path, num_lines + 1)
        num_blocks += 1
        num_lines = block[-1].number
        yield from block
    if num_blocks < len(facts.block_digests):
        raise _changed(path, num_lines + 1)


class PartialOutput:
    """OUTPUT.partial and OUTPUT.partial.json, until `finish` renames the former to OUTPUT.

    Wherever a run is killed, the facts it leaves are those of the lines it leaves, or there are no lines.

    Use as a context manager: leaving it by any way flushes what is written to the disk.

    Attributes:
        num_done: complete lines that were there already.
    """

    def __init__(self, place: OutputPlace, identity: JobIdentity, *, resume: bool) -> None:
        """Open or create the partial output.

        Args:
            place: entered, thus this process's own.
            identity: of this job.
            resume: go on with an existing partial output of the same identity; else it is removed.

        Raises:
            InvalidOption: the partial output belongs to another job.
        """
        self._place = place
        self.num_done = 0
        if resume and place.partial.exists():
            self._check_identity(identity)
            self.num_done, size = _complete_lines(place.partial)
            os.truncate(place.partial, size)
        else:
            # Old lines are gone for certain before new facts say whose lines there are.
            place.partial.unlink(missing_ok=True)
            place.sync_folder()
            _write_durably(place.new_facts, identity.model_dump_json(indent=2).encode() + b"\n")
            os.replace(place.new_facts, place.facts)
            place.sync_folder()
            place.partial.open("xb").close()
            place.sync_folder()
        self._file: BinaryIO = place.partial.open("ab")
        self._synced_at_s = time.monotonic()

    def __enter__(self) -> PartialOutput:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Make what is written durable and close."""
        if not self._file.closed:
            # Closed even when the disk is full; closing twice does no harm.
            with self._file:
                self._sync()

    def write(self, line: bytes) -> None:
        """Append one line, its ending included; every few seconds to the disk."""
        self._file.write(line)
        if time.monotonic() - self._synced_at_s >= _SYNC_EVERY_S:
            self._sync()

    def finish(self) -> None:
        """Rename the complete output to its name.

        Raises:
            InvalidRequest: something else took OUTPUT.partial away.
            InvalidOption: something else made OUTPUT.
        """
        self._sync()
        self._place.check_is_partial(self._file.fileno())
        self._file.close()
        self._place.publish()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced_at_s = time.monotonic()

    def _check_identity(self, identity: JobIdentity) -> None:
        partial, facts = self._place.partial, self._place.facts
        try:
            found = JobIdentity.model_validate_json(facts.read_bytes())
        except (FileNotFoundError, ValidationError):
            raise InvalidOption(
                f"{facts} is missing or damaged, so {partial} cannot be matched to its input; "
                "pass --force without --resume to start again"
            ) from None
        mine, theirs = identity.model_dump(), found.model_dump()
        differing = [name for name in mine if mine[name] != theirs[name]]
        if differing:
            # Nobody need have chosen a variant: under auto it follows from the machine.
            by = f" with --variant {found.variant}" if "variant" in differing else ""
            raise InvalidOption(
                f"{partial} was made with another {' and another '.join(differing)}; restore that{by}, "
                "or pass --force without --resume to start again"
            )


def _blocks_of(path: Path) -> Iterator[list[Line]]:
    """The lines in blocks; where a block ends depends on nothing but the bytes before."""
    block: list[Line] = []
    num_bytes = 0
    for line in lines_of_file(path):
        block.append(line)
        num_bytes += len(line.content) + len(line.ending)
        if num_bytes >= _BLOCK_BYTES:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def _bytes_of(block: list[Line]) -> bytes:
    return b"".join(part for line in block for part in (line.content, line.ending))


def _changed(path: Path, line_number: int) -> InvalidRequest:
    return InvalidRequest(
        f"{path} was changed while it was translated, at line {line_number} or later; the lines before are "
        "kept: restore it and pass --resume, or pass --force without --resume to translate it as it is now"
    )


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
