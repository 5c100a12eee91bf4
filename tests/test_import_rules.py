"""The layers of docs/architecture.md ("Who may import whom"), held against every file's syntax tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "model", "exporters")
MAX_LINES = 400

# Longest prefix wins. A module may import its own layer and those below.
LAYERS = {
    "app": 0,  # the package itself holds nothing but its docstring
    "app.errors": 0,
    "app.bundle": 0,
    "app.text": 0,
    "app.keys": 0,
    "app.decoding": 1,
    "app.runtime.runner": 1,
    "app.runtime.device": 1,
    "app.runtime.slots": 1,
    "app.runtime.scheduler": 1,
    "app.runtime.entry": 1,
    "app.runtime.events": 1,
    "app.runtime.request": 1,
    "app.runtime.preparation": 1,
    "app.runtime.guidance_of_request": 1,
    "app.runtime": 2,
    "app.observability": 2,
    "app.runtime.admission": 1,
    "app.runtime.translation_cache": 1,
    "app.runtime.flights": 1,
    "app.runtime.fair_queue": 1,
    "app.runtime.deadlines": 1,
    "app.runtime.gpu.copies": 1,
    "app.runtime.canary": 3,
    "app.runtime.dispatch": 3,
    "app.runtime.editions": 3,
    "app.runtime.engine_options": 3,
    "app.runtime.reload": 3,
    "app.runtime.served_model": 3,
    "app.runtime.engine": 3,
    "app.api": 4,
    "app.settings": 5,
    "app.cli": 5,
    "app.__main__": 5,
}
# Where the training side meets its user: here alone `model` may import `exporters`, inside a function.
MODEL_COMMANDS = ("model.data.cli", "model.training.cli", "model.evaluation.cli", "model.figures.cli")
# A library, and the only modules that may import it. Everything else of the installed world is free.
ONLY_IN = {
    "opentelemetry": ("app.observability.opentelemetry_tracer",),
    "torch": ("model", "exporters"),
    "onnx": ("exporters",),
    "onnxruntime": (
        "app.runtime.onnx_model",
        "app.runtime.onnx_runner",
        "app.runtime.onnx_buffers",
        "app.runtime.onnx_candidates",
        "app.runtime.onnx_providers",
        "app.runtime.gpu.model",
        "app.runtime.gpu.buffers",
        "app.runtime.gpu.memory",
        "app.runtime.gpu.stream",
    ),
    "threading": (
        "app.runtime.worker",
        "app.runtime.gpu.graphs",
        "app.runtime.gpu.memory",
        "app.observability",
    ),
    "_thread": (),
    "multiprocessing": (),
    "concurrent": ("app.cli.serve",),
    "fastapi": ("app.api",),
    "starlette": ("app.api",),
    "uvicorn": ("app.cli", "app.__main__"),
    "typer": (
        "app.cli",
        "app.__main__",
        "exporters.cli",
        "exporters.shortlist_cli",
        *MODEL_COMMANDS,
        "model.data.options",
        "model.data.rare_words_cli",
    ),
    "pydantic_settings": ("app.settings",),
    "throttled": ("app.api",),
    "pickle": (),
}
# The training side may be named here alone in `app`, and only inside a function.
LAZY_TRAINING = ("app.__main__",)


def is_under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(f"{prefix}.")


def layer_of(module: str) -> int:
    return LAYERS[max((prefix for prefix in LAYERS if is_under(module, prefix)), key=len)]


def imports_of(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[tuple[ast.AST, str, bool]]:
    """Every import: its node, the dotted name, and whether it stands inside a function."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            # `from app.runtime import engine` names a module too: the longer name is judged as well.
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("__import__", "import_module", "find_spec", "run_module"):
                first = node.args[0]
                names = [first.value if isinstance(first, ast.Constant) else "<a computed name>"]
        yield from ((node, name, id(node) in inside) for name in names)


def faults_of(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a module of this name and content does that its layer forbids."""
    faults = []
    package = module.split(".", 1)[0]
    for node, name, is_lazy in imports_of(ast.parse(source), module, is_package=is_package):
        where = f"{module}:{node.lineno} imports {name}"  # type: ignore[attr-defined]
        top = name.split(".", 1)[0]
        if name.startswith("<"):
            faults.append(f"{where}: nobody can check that")
        for library, users in ONLY_IN.items():
            if is_under(name, library) and not any(is_under(module, user) for user in users):
                faults.append(f"{where}: only in {users or 'no module'}")
        if top not in PACKAGES:
            continue
        if package == "app":
            if top != "app" and any(is_under(module, user) for user in LAZY_TRAINING):
                if not is_lazy:
                    faults.append(f"{where}: only inside a function")
            elif top != "app":
                faults.append(f"{where}: the service does without it")
            elif layer_of(name) > layer_of(module):
                faults.append(f"{where}: layer {layer_of(module)} imports layer {layer_of(name)}")
        elif package == "model":
            allowed = ("model", "app.bundle", "app.text", "app.errors")
            if top == "exporters" and module in MODEL_COMMANDS:
                if not is_lazy:
                    faults.append(f"{where}: only inside a function")
            elif name != "app" and not any(is_under(name, prefix) for prefix in allowed):
                faults.append(f"{where}: model may import {', '.join(allowed)}")
        elif top == "app" and layer_of(name) > 2:
            faults.append(f"{where}: exporters may import layers 0 to 2")
    return faults


def modules() -> list[tuple[str, Path]]:
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


@pytest.mark.parametrize(("module", "path"), [pytest.param(*item, id=item[0]) for item in modules()])
def test_a_module_imports_only_what_its_layer_allows(module: str, path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert faults_of(source, module, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(("module", "path"), [pytest.param(*item, id=item[0]) for item in modules()])
def test_a_file_can_be_read_in_one_sitting(module: str, path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_every_folder_of_python_files_is_looked_at() -> None:
    assert {module for module, _ in modules()} >= {
        "app.__main__",
        "app.runtime.engine",
        "app.cli.serve",
        "model.transformer",
        "exporters.graphs",
    }


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("app.text.x", "import torch"),
        ("app.text.x", "import torch.nn.functional as F"),
        ("app.text.x", "def f():\n    from torch import nn"),
        ("app.text.x", "import importlib\nimportlib.import_module('torch.nn')"),
        ("app.text.x", "__import__('onnx')"),
        ("app.text.x", "from importlib import import_module\nimport_module('mod' + 'el')"),
        ("app.text.x", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import model.transformer"),
        ("app.runtime.engine", "import exporters.export"),
        ("app.runtime.engine", "def f():\n    import exporters.export"),
        ("app.__main__", "from exporters.export import export_bundle"),
        ("app.cli.x", "import model.greedy"),
        ("app.cli.x", "def f():\n    import model.greedy"),
        ("app.runtime.engine", "import onnxruntime"),
        ("app.runtime.onnx_other", "import onnxruntime"),
        ("app.runtime.lane", "import threading"),
        ("app.api.server", "from concurrent.futures import ThreadPoolExecutor"),
        ("app.runtime.engine", "from fastapi import FastAPI"),
        ("app.cli.serve", "import starlette.responses"),
        ("app.api.server", "from app.settings import Settings"),
        ("app.api.server", "from app import settings"),
        ("app.api.server", "from .. import settings"),
        ("app.api.server", "from ..settings import Settings"),
        ("app.runtime.scheduler", "from app.runtime.worker import Worker"),
        ("app.runtime.scheduler", "from .worker import Worker"),
        ("app.decoding.greedy", "from app.runtime.lane import Lane"),
        ("app.text.x", "from app.decoding import options"),
        ("app.runtime.worker", "from app.runtime import engine"),
        ("app.observability.x", "import app.runtime.engine"),
        ("app.runtime.engine", "from app.api import create_app"),
        ("model.x", "from app.decoding.shortlist import Shortlist"),
        ("model.x", "from app.runtime.runner import ModelRunner"),
        ("model.x", "from exporters.checkpoint import Checkpoint"),
        ("exporters.x", "from app.runtime.engine import Engine"),
        ("exporters.x", "from app.cli import opening"),
        ("app.bundle.x", "import pickle"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert faults_of(source, module)


def test_a_relative_import_in_a_package_is_read_from_the_package() -> None:
    assert faults_of("from .settings import Settings", "app.api", is_package=True) == []
    assert faults_of("from ..settings import Settings", "app.api", is_package=True)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("app.__main__", "def export():\n    from exporters.export import export_bundle"),
        ("app.runtime.engine", "import asyncio\nasyncio.to_thread(print)"),
        ("app.observability.metrics", "import threading"),
        ("app.api.server", "from app.runtime.engine import Engine"),
        (
            "exporters.x",
            "from app.runtime.lane import Lane\nimport torch, onnx\nfrom model.greedy import greedy",
        ),
        ("model.x", "from app.text import Tokenizer\nfrom app.errors import DragomanError"),
        ("app.runtime.worker", "from .lane import Lane"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert faults_of(source, module) == []


def test_the_named_libraries_exist_or_are_standard() -> None:
    """A misspelt name in the table would guard nothing."""
    tree_names = {
        name.split(".", 1)[0]
        for module, path in modules()
        for _, name, _ in imports_of(ast.parse(path.read_text(encoding="utf-8")), module, is_package=False)
    }
    assert set(ONLY_IN) <= tree_names | set(sys.stdlib_module_names)
