"""Where a file's translation is written: OUTPUT and the files beside it, for one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

from app.errors import InvalidOption, InvalidRequest, Unavailable

_MAX_PID_BYTES = 32


class OutputPlace:
    """OUTPUT, and beside it what an unfinished run needs; refuses whatever must not be written over.

    Entering it as a context manager takes a lock that other processes respect; leaving it gives the lock
    back, as does the end of the process however it ends.

    Attributes:
        output: where the finished translation will lie.
        partial: OUTPUT.partial, the lines so far.
        facts: OUTPUT.partial.json, what they belong to.
        new_facts: OUTPUT.partial.json.new, which becomes `facts` when it is complete.
        lock: OUTPUT.partial.lock, which holds the id of the process that has the place.
    """

    def __init__(self, output: Path, *, source_file: Path, resume: bool, force: bool) -> None:
        """Check the names; nothing is written yet.

        Args:
            output: as the user named it.
            source_file: the input, which must be none of these files.
            resume: whether an existing partial output is wanted.
            force: whether an existing output may be replaced; without `resume`, a partial one too.

        Raises:
            InvalidOption: nothing can be written there, or it is no ordinary file, or it is the input.
        """
        if output.is_dir():
            raise InvalidOption(f"{output} is a folder; name a file, such as {output / 'translation.txt'}")
        if not output.parent.is_dir():
            raise InvalidOption(f"{output.parent} is not a folder; make it, or name another output")
        self.output = output
        self.partial = output.with_name(f"{output.name}.partial")
        self.facts = output.with_name(f"{output.name}.partial.json")
        self.new_facts = output.with_name(f"{output.name}.partial.json.new")
        self.lock = output.with_name(f"{output.name}.partial.lock")
        self._resume = resume
        self._force = force
        self._lock_descriptor = -1
        if output.exists() and not output.is_file():
            raise InvalidOption(f"{output} is not an ordinary file; name another, or use a pipe")
        for path in (output, self.partial, self.facts, self.new_facts, self.lock):
            # Before anything that advises --force: forcing would destroy the input.
            if path.exists() and path.samefile(source_file):
                raise InvalidOption(
                    f"the input {source_file} would be written over, since it is the same file as {path}; "
                    "name another output"
                )
        if output.is_symlink():
            # The last step is a rename: it would replace the link and leave what it points to as it was.
            raise InvalidOption(f"{output} is a link; name the file that it points to, {output.resolve()}")
        for path in (self.partial, self.facts, self.new_facts, self.lock):
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                raise InvalidOption(
                    f"{path} is in the way, not an ordinary file; move it, or name another output"
                )

    def __enter__(self) -> OutputPlace:
        """Take the place.

        Raises:
            InvalidOption: a file is in the way, or the folder cannot be written or locked.
            Unavailable: another process has the place.
        """
        self._lock_descriptor = self._take()
        try:
            self._refuse_leftovers()
        except BaseException:
            self._give_back()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Give the place back."""
        self._give_back()

    def publish(self) -> None:
        """Rename the partial output, complete and on the disk, to its name.

        Raises:
            InvalidOption: the output appeared during the run, and may not be replaced.
        """
        if os.path.lexists(self.output) and not self._force:
            raise InvalidOption(
                f"{self.output} was made by something else during this run; move it away and pass --resume, "
                "or pass --resume --force to replace it"
            )
        os.replace(self.partial, self.output)
        self.sync_folder()
        # Last: facts without lines do no harm, lines without facts cannot be resumed.
        self.facts.unlink(missing_ok=True)

    def sync_folder(self) -> None:
        """Make files' names durable: on a disk, a rename is not ordered with what follows it until then."""
        descriptor = os.open(self.output.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot do this to folders and say so.
            if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
                raise
        finally:
            os.close(descriptor)

    def check_is_partial(self, descriptor: int) -> None:
        """Check that the open file is still the one at `partial`.

        Raises:
            InvalidRequest: it was moved, removed or replaced.
        """
        if not _lies_at(descriptor, self.partial):
            raise InvalidRequest(
                f"{self.partial} was moved or replaced by something else during this run, so {self.output} "
                "is not made; translate again, with an output that nothing else uses"
            )

    def _refuse_leftovers(self) -> None:
        if os.path.lexists(self.output) and not self._force:
            done = " (an output is made when it is whole: there is nothing to resume)" if self._resume else ""
            raise InvalidOption(
                f"{self.output} exists{done}; name another file, or pass --force to replace it"
            )
        if self.partial.exists() and not (self._resume or self._force):
            raise InvalidOption(
                f"{self.partial} is left from an interrupted run; pass --resume to go on with it, "
                "or --force to start again"
            )

    def _take(self) -> int:
        while True:
            try:
                descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            except OSError as error:
                raise InvalidOption(
                    f"{self.output} cannot be written: making {self.lock} failed with {error.strerror}; "
                    "name an output in a folder where you may write"
                ) from None
            try:
                self._lock(descriptor)
                # Who had the lock before may have removed the file after it was opened here.
                if _lies_at(descriptor, self.lock):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, b"%d\n" % os.getpid())
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(descriptor, _MAX_PID_BYTES, 0).strip().decode("ascii", "replace")
            who = f"process {pid}" if pid.isdecimal() else "another process"
            raise Unavailable(
                f"{who} is writing {self.output} now; wait for its end or stop it, or name another output"
            ) from None
        except OSError as error:
            raise InvalidOption(
                f"{self.lock} cannot be locked ({error.strerror}); name an output on a file system with locks"
            ) from None

    def _give_back(self) -> None:
        try:
            # While the lock is still held, so that it is this process's file that is removed.
            self.lock.unlink(missing_ok=True)
        finally:
            os.close(self._lock_descriptor)


def _lies_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False
