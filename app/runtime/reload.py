"""Other models without a restart: read the bundles again, load what has changed, and only then exchange.

Whatever goes wrong before the exchange leaves the running models as they are. Until then the old and the new
models are in memory together.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import structlog

from app.bundle import MANIFEST_NAME, Bundle
from app.errors import BundleCorrupt, DragomanError, ReloadFailed, ReloadInProgress, ShuttingDown
from app.runtime.freed_memory import return_freed_memory
from app.runtime.memory_shortage import lacks_memory
from app.runtime.served_model import ServedModel

Result = TypeVar("Result")

_log: structlog.stdlib.BoundLogger = structlog.get_logger("dragoman.reload")


class Change(StrEnum):
    """What became of a bundle."""

    UNCHANGED = "unchanged"
    """It is served already, with the same manifest, and so with the same checksums."""
    LOADED = "loaded"
    """It is new, or another one under the same id."""
    REMOVED = "removed"
    """It is not in the folder any more."""


class ReloadOutcome(StrEnum):
    """How a reload ended, for the metrics."""

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True)
class BundleChange:
    """One bundle's part of a reload.

    Attributes:
        bundle: its id.
        change: what became of it.
        seconds: how long it took to load; 0 where nothing was loaded.
    """

    bundle: str
    change: Change
    seconds: float = 0.0


@dataclass(frozen=True)
class ReloadReport:
    """A reload that succeeded.

    Attributes:
        changes: one for each bundle that was or is served, by id.
        seconds: from the call to the exchange, reading and proving included.
    """

    changes: tuple[BundleChange, ...]
    seconds: float

    def bundles(self, change: Change) -> list[str]:
        """Ids of the bundles that this became of."""
        return [part.bundle for part in self.changes if part.change is change]


class ExchangingEngine(Protocol):
    """The part of `app.runtime.engine.Engine` that a reload uses."""

    @property
    def draining(self) -> bool:
        """Whether the service is stopping."""
        ...

    async def exchange(self, loaded: Sequence[ServedModel], *, order: Sequence[str]) -> None:
        """Serve other models from now on, or raise and change nothing."""
        ...


class Reloader:
    """Brings the running models in line with the bundles on disk; on the event loop."""

    def __init__(
        self,
        engine: ExchangingEngine,
        bundles: Iterable[Bundle],
        *,
        read: Callable[[], Sequence[Bundle]],
        load: Callable[[Bundle], ServedModel],
        observe: Callable[[ReloadOutcome], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch over an engine's models.

        Args:
            engine: what serves them.
            bundles: those it serves now.
            read: opens and verifies the bundles that are to be served, in order of precedence; in a thread.
            load: makes a model of one; in a thread.
            observe: told how each reload ended.
            clock: monotonic seconds.
        """
        self._engine = engine
        self._bundles = {bundle.manifest.id: bundle for bundle in bundles}
        self._read = read
        self._load = load
        self._observe = observe
        self._clock = clock
        self._running: asyncio.Task[ReloadReport] | None = None

    async def reload(self) -> ReloadReport:
        """Load every bundle that is new or has changed, then serve what is there; goes on if cancelled.

        Raises:
            ReloadInProgress: another one has not ended yet, and may have read the folder already.
            BundleError: a bundle is damaged, missing or cannot translate; names it.
            ReloadFailed: anything else, such as too little memory; names the bundle.
            ShuttingDown: the service is stopping.
        """
        if self._engine.draining:
            raise _stopping()
        if self._running is not None:
            self._observe(ReloadOutcome.REFUSED)
            _log.warning("reload_refused", reason="another reload is running")
            raise ReloadInProgress(
                "another reload is running, and may have read the bundles before you changed them; ask again "
                "when it is done"
            )
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._note_end)
        return await asyncio.shield(self._running)

    def _note_end(self, running: asyncio.Task[ReloadReport]) -> None:
        self._running = None
        if not running.cancelled():
            running.exception()  # logged already, whether or not anybody still waits for it

    async def _run(self) -> ReloadReport:
        started_at_s = self._clock()
        try:
            changes = await self._bring_in_line()
        except ShuttingDown:
            raise
        except DragomanError as error:
            self._observe(ReloadOutcome.FAILED)
            _log.error("reload_failed", error=error.code, reason=error.message, exc_info=error)
            _forget_locals(error)
            await asyncio.to_thread(return_freed_memory)
            raise
        report = ReloadReport(changes, self._clock() - started_at_s)
        is_same = all(part.change is Change.UNCHANGED for part in changes)
        self._observe(ReloadOutcome.UNCHANGED if is_same else ReloadOutcome.CHANGED)
        _log.info(
            "reloaded",
            seconds=round(report.seconds, 3),
            **{change.value: report.bundles(change) for change in Change},
        )
        return report

    async def _bring_in_line(self) -> tuple[BundleChange, ...]:
        bundles = await _named(asyncio.to_thread(self._read), what="what lies in the bundles' folder")
        changes = {id_: BundleChange(id_, Change.REMOVED) for id_ in self._bundles}
        loaded: list[ServedModel] = []
        for bundle in bundles:
            id_ = bundle.manifest.id
            before = self._bundles.get(id_)
            if before is not None and before.manifest == bundle.manifest:
                changes[id_] = BundleChange(id_, Change.UNCHANGED)
                continue
            started_at_s = self._clock()
            loaded.append(await _named(asyncio.to_thread(self._load, bundle), what=f"bundle {bundle.path}"))
            changes[id_] = BundleChange(id_, Change.LOADED, self._clock() - started_at_s)
        gone = [self._bundles[id_] for id_, part in changes.items() if part.change is Change.REMOVED]
        await asyncio.to_thread(_check_gone, gone, bundles)
        order = [bundle.manifest.id for bundle in bundles]
        if list(self._bundles) != order or loaded:
            what = f"bundle {', '.join(model.id for model in loaded) or '(none is new)'}"
            await _named(self._engine.exchange(loaded, order=order), what=what)
        self._bundles = {bundle.manifest.id: bundle for bundle in bundles}
        return tuple(changes[id_] for id_ in sorted(changes))


def _check_gone(bundles: Iterable[Bundle], found: Iterable[Bundle]) -> None:
    """A bundle is taken out of service when its folder is, and not when it only lost its manifest."""
    others = {bundle.path for bundle in found}
    for bundle in bundles:
        if os.path.lexists(bundle.path) and bundle.path not in others:
            raise BundleCorrupt(
                f"{bundle.path} is still there and holds no readable {MANIFEST_NAME}; restore the bundle "
                f"{bundle.manifest.id}, or remove the folder to have it served no longer"
            )


async def _named(work: Awaitable[Result], *, what: str) -> Result:
    """Await a part of a reload; whatever it raises that is no error of ours becomes one.

    Raises:
        ReloadFailed: names `what` failed.
    """
    try:
        return await work
    except Exception as error:
        # The runtime's own lack of memory passes for a file that it cannot read, or a graph that fails.
        is_short = lacks_memory(error)
        if isinstance(error, DragomanError) and not is_short:
            raise
        cause = error
    if is_short:
        why = (
            "there is too little memory for the old and the new models together; give the service more, or "
            "start it anew, which needs memory for the new ones alone"
        )
    else:
        why = f"{type(cause).__name__}, see the line reload_failed of the service's log"
    raise ReloadFailed(f"{what} could not be loaded: {why}. The models that ran before go on") from cause


def _forget_locals(error: BaseException | None) -> None:
    """Empty the frames that an error and its causes have passed: what was loaded hangs on them."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def _stopping() -> ShuttingDown:
    return ShuttingDown("the service is shutting down and takes no other models; start it anew")
