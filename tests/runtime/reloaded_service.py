"""An engine over a folder of bundles, and what reloads it."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

from tiny_models import tiny_texts

from app.bundle import Bundle, discover
from app.runtime.engine import Engine, EngineOptions
from app.runtime.reload import Reloader, ReloadOutcome
from app.runtime.request import TranslationRequest
from app.runtime.served_model import ServedModel, load_served_model

TEXTS = tiny_texts(6)


def load(bundle: Bundle) -> ServedModel:
    return load_served_model(bundle, variant="cpu-fp32", max_rows=4, use_shortlist=False)


async def translated(engine: Engine, *, source: str = "en", target: str = "pt") -> list[str]:
    result = await engine.translate(TranslationRequest(TEXTS, source, target))
    return [text.text for text in result.texts]


class Service:
    """An engine over a folder of bundles, and what reloads it.

    Attributes:
        loaded: ids in the order they were loaded.
        on_load: called before each loading, in its thread.
        models: those that were loaded, as far as they are still in memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: list[ReloadOutcome] = []
        self.loaded: list[str] = []
        self.on_load: Callable[[Bundle], None] = lambda bundle: None
        self.models: list[weakref.ref[ServedModel]] = []
        bundles = discover(folder)
        self.engine = Engine(
            [load(bundle) for bundle in bundles],
            EngineOptions(num_workers=1, max_rows=4, max_cache_bytes=1_000_000),
        )
        self.reloader = Reloader(
            self.engine,
            bundles,
            read=lambda: discover(folder),
            load=self._load,
            observe=self.outcomes.append,
        )

    def _load(self, bundle: Bundle) -> ServedModel:
        self.on_load(bundle)
        model = load(bundle)
        self.models.append(weakref.ref(model))
        self.loaded.append(model.id)
        return model

    async def reload(self) -> dict[str, str]:
        return {part.bundle: part.change.value for part in (await self.reloader.reload()).changes}

    def put(self, source: Path, name: str) -> None:
        """Put a bundle in place of another one, as operators should: the files of the old one stay whole."""
        target = self.folder / name
        if target.exists():
            target.rename(self.folder.parent / f"old-{len(list(self.folder.parent.iterdir()))}")
        shutil.copytree(source, target)
