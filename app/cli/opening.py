"""From settings to bundles and an engine, for every command that translates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.bundle import Bundle, discover
from app.cli.loading import load_models
from app.cli.placement import Placement
from app.errors import InvalidRequest
from app.runtime.engine import Engine, EngineOptions
from app.runtime.events import RuntimeObserver
from app.runtime.reload import Reloader, ReloadOutcome
from app.runtime.request import PairInfo
from app.runtime.served_model import ServedModel
from app.runtime.translation_cache import CacheObserver
from app.settings import Settings


@dataclass(frozen=True)
class Choice:
    """What a command line translates with.

    Attributes:
        bundle: the one bundle to be loaded.
        pair: the pair, by the bundle's codes.
    """

    bundle: Bundle
    pair: PairInfo


def open_engine(
    models: Sequence[ServedModel],
    settings: Settings,
    placement: Placement,
    *,
    max_waiting_tokens: int,
    observer: RuntimeObserver,
    cache_observer: CacheObserver | None = None,
    request_timeout_s: float = 0.0,
) -> Engine:
    """An engine for loaded models.

    Args:
        models: what it serves.
        settings: how to use the machine.
        placement: likewise, where it depends on the devices.
        max_waiting_tokens: see `EngineOptions`.
        observer: told of every step.
        cache_observer: told of every look-up in the translation cache.
        request_timeout_s: see `EngineOptions`; the setting of that name is for requests over HTTP alone.
    """
    options = EngineOptions(
        num_workers=placement.num_workers,
        max_waiting_tokens=max_waiting_tokens,
        max_admission_tokens=placement.max_admission_tokens,
        max_rows=placement.max_rows,
        use_shortlist=settings.use_shortlist,
        max_bulk_share=settings.max_bulk_share,
        request_timeout_s=request_timeout_s,
        max_cache_bytes=settings.max_cache_bytes,
    )
    return Engine(models, options, observer=observer, cache_observer=cache_observer)


def open_reloader(
    engine: Engine,
    bundles: Iterable[Bundle],
    settings: Settings,
    placement: Placement,
    *,
    observe: Callable[[ReloadOutcome], None],
) -> Reloader:
    """What loads the bundles anew, from the same folder, with the same settings and devices as at the start.

    Args:
        engine: what serves them.
        bundles: those it serves now.
        settings: of the service.
        placement: where it runs.
        observe: told how each reload ended.
    """
    return Reloader(
        engine,
        bundles,
        read=functools.partial(discover, settings.bundles),
        load=lambda bundle: load_models([bundle], settings, placement)[0],
        observe=observe,
    )


def choose(directory: Path, *, source: str | None, target: str | None) -> Choice:
    """Find the bundle for a pair; a single pair needs no naming.

    Args:
        directory: a folder of bundles, or one bundle.
        source: code as the user wrote it; None if it was not given.
        target: likewise.

    Raises:
        InvalidRequest: source or target is missing, and there are several pairs.
        UnsupportedPair: no bundle translates the pair.
    """
    from app.api.languages import LanguageTable  # brings the web framework: only where it is needed

    bundles = discover(directory)
    bundle_of = {
        PairInfo(pair.source, pair.target, bundle.manifest.id): bundle
        for bundle in bundles
        for pair in bundle.manifest.pairs
    }
    if source is None and target is None and len(bundle_of) == 1:
        pair = next(iter(bundle_of))
    elif source is None or target is None:
        pairs = ", ".join(f"{pair.source} to {pair.target}" for pair in bundle_of)
        raise InvalidRequest(f"name the languages with --source and --target; available are: {pairs}")
    else:
        pair = LanguageTable(bundle_of).resolve(source, target)
    return Choice(bundle_of[pair], pair)
