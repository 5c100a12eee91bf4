from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from line_engine import LineEngine

from app.cli import translate as translate_module
from app.cli.opening import Choice


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> LineEngine:
    engine = LineEngine()
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "manifest.json").write_text("{}")
    bundle: Any = SimpleNamespace(path=folder)

    def choose(directory: Path, *, source: str | None, target: str | None) -> Choice:
        return Choice(bundle, engine.pairs[0])

    def load_models(bundles: Any, settings: Any, placement: Any) -> Any:
        return bundles

    def open_engine(models: Any, *arguments: Any, **named: Any) -> LineEngine:
        assert models == [bundle]
        return engine

    monkeypatch.setattr(translate_module, "choose", choose)
    monkeypatch.setattr(translate_module, "load_models", load_models)
    monkeypatch.setattr(translate_module, "open_engine", open_engine)
    return engine
