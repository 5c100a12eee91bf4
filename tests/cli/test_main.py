import importlib
import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.bundle import MANIFEST_NAME, default_directory

SHIPPED = default_directory() / "en-pt"
shipped = pytest.mark.skipif(
    not (SHIPPED / MANIFEST_NAME).is_file(), reason="the shipped bundles are not built"
)


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["translate"], ["models"], ["models", "verify"], ["settings"]]
)
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    assert "Usage: dragoman" in capsys.readouterr().out


def test_help_loads_no_web_framework_no_runtime_and_no_model() -> None:
    script = (
        "import sys, contextlib\n"
        "from app.__main__ import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "heavy = {'fastapi', 'uvicorn', 'pydantic', 'numpy', 'onnxruntime', 'torch', 'structlog'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_version_is_printed_even_where_nothing_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", lambda name: "1.2.3")
    assert run("--version") == 0
    monkeypatch.setattr(metadata, "version", absent)
    assert run("--version") == 0
    assert capsys.readouterr().out.splitlines() == ["dragoman 1.2.3", "dragoman 0+not.installed"]


def test_an_unknown_command_or_option_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("translat") == 2
    assert run("serve", "--prot", "1") == 2
    assert run("serve", "--port", "http") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_settings_are_listed_with_their_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAGOMAN_PORT", "9123")
    monkeypatch.setenv("COLUMNS", "200")
    assert run("settings") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "DRAGOMAN_PORT" in line)
    assert "9123" in line


def test_export_without_its_libraries_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        assert name == "exporters.cli"
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(importlib, "import_module", missing)
    assert run("export", "--help") == 1
    assert "pip install 'dragoman[train]'" in capsys.readouterr().err


def test_export_hands_all_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    class Exporters:
        @staticmethod
        def app(*, args: list[str], prog_name: str) -> None:
            seen.update(args=args, prog_name=prog_name)

    monkeypatch.setattr(importlib, "import_module", lambda name: Exporters)
    assert run("export", "marian", "folder", "--output", "x", "--help") == 0
    assert seen == {"args": ["marian", "folder", "--output", "x", "--help"], "prog_name": "dragoman export"}


def test_a_folder_without_bundles_is_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["models", "list"], ["models", "verify"]):
        assert run(*command, "--bundles", tmp_path) == 1
        errors = capsys.readouterr().err
        assert errors.startswith("dragoman: no bundle")
        assert errors.count("\n") == 1


@shipped
def test_the_shipped_bundles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"source": "en", "target": "pt"} in [pair for model in listed for pair in model["pairs"]]
    assert all(model["size_bytes"] > 0 and model["licence"] for model in listed)
    assert run("models", "list") == 0
    assert "en to pt" in capsys.readouterr().out


@shipped
def test_verify_finds_one_altered_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "en-pt"
    shutil.copytree(SHIPPED, copy)
    assert run("models", "verify", "--bundles", tmp_path) == 0
    largest = max((path for path in copy.iterdir()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    capsys.readouterr()
    assert run("models", "verify", "--bundles", tmp_path, "--json") == 1
    (result,) = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert largest.name in result["message"]


@shipped
def test_the_shipped_models_translate_texts_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("translate", "-s", "EN", "-t", "pt-BR", "--workers", "1", "Good morning.", "") == 0
    first, empty = capsys.readouterr().out.splitlines()
    assert first
    assert first != "Good morning."
    assert empty == ""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(b"Good morning.\r\n\nGood morning.")
    assert run("translate", "--bundle", SHIPPED, "--workers", "1", "-i", source, "-o", output) == 0
    assert output.read_bytes() == f"{first}\r\n\n{first}".encode()


@shipped
def test_a_pair_that_is_missing_or_unnamed_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("translate", "-s", "en", "-t", "xx", "text") == 2
    assert "en to pt" in capsys.readouterr().err
    assert run("translate", "text") == 2
    assert "--source and --target" in capsys.readouterr().err
