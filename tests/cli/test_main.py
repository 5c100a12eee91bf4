import importlib
import json
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main

from app.__main__ import main
from app.bundle import MANIFEST_NAME, default_directory
from app.settings import Settings

SHIPPED = default_directory() / "en-pt"


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


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_settings_are_listed_whole_at_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    long = "https://a-page-with-a-long-name.example,https://another-page-with-a-long-name.example"
    monkeypatch.setenv("DRAGOMAN_CORS_ORIGINS", long)
    monkeypatch.setenv("COLUMNS", columns)
    assert run("settings") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"DRAGOMAN_CORS_ORIGINS={long}" in lines
    assert [line.partition("=")[0] for line in lines if not line.startswith(" ")] == [
        f"DRAGOMAN_{name.upper()}" for name in Settings.model_fields
    ]
    words = " ".join(line.strip() for line in lines if line.startswith(" "))
    assert words == " ".join(str(field.description) for field in Settings.model_fields.values())


def test_settings_are_listed_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAGOMAN_PORT", "9123")
    assert run("settings", "--json") == 0
    listed = {fact["variable"]: fact for fact in json.loads(capsys.readouterr().out)}
    assert listed["DRAGOMAN_PORT"] == {
        "variable": "DRAGOMAN_PORT",
        "value": 9123,
        "meaning": Settings.model_fields["port"].description,
    }
    assert listed["DRAGOMAN_USE_SHORTLIST"]["value"] is True
    assert len(listed) == len(Settings.model_fields)


def without_torch(name: str) -> Any:
    assert name == "exporters.cli"
    raise ModuleNotFoundError("No module named 'torch'", name="torch")


def test_export_without_its_libraries_says_what_works_from_a_checkout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib, "import_module", without_torch)
    assert run("export", "marian", "folder") == 1
    errors = capsys.readouterr().err
    assert "export needs torch" in errors
    assert "pip install -c constraints.txt -e '.[cpu,train]'" in errors
    assert "make tools" in errors
    assert "dragoman[train]" not in errors


@pytest.mark.parametrize("arguments", [[], ["--help"], ["marian", "-h"]])
def test_export_explains_itself_without_its_libraries(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", without_torch)
        assert run("export", *arguments) == 0
    shown = capsys.readouterr().out
    assert "Usage: dragoman export" in shown
    assert "constraints.txt" in shown
    # With the libraries the exporters' own help is shown; both must know the same commands.
    exporter = pytest.importorskip("exporters.cli").app
    for command in typer.main.get_command(exporter).commands:  # type: ignore[attr-defined]
        assert f"  {command} " in shown


def test_export_hands_all_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    class Exporters:
        @staticmethod
        def app(*, args: list[str], prog_name: str) -> None:
            seen.update(args=args, prog_name=prog_name)

    monkeypatch.setattr(importlib, "import_module", lambda name: Exporters)
    assert run("export", "marian", "folder", "--output", "x", "--help") == 0
    assert seen == {"args": ["marian", "folder", "--output", "x", "--help"], "prog_name": "dragoman export"}


def test_a_folder_without_bundles_is_an_error_in_one_line_and_the_same_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # `serve` would leave its signal handler to the tests after this one.
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    commands = (["models", "list"], ["models", "verify"], ["serve", "--port", "0"])
    for folder, message in (
        (tmp_path, "no bundle"),
        (tmp_path / "absent", f"{tmp_path / 'absent'} is not a"),
    ):
        said = set()
        for command in commands:
            assert run(*command, "--bundles", folder) == 1
            said.add(capsys.readouterr().err)
        (errors,) = said
        assert errors.startswith(f"dragoman: {message}")
        assert errors.count("\n") == 1


def test_the_shipped_bundles_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"source": "en", "target": "pt"} in [pair for model in listed for pair in model["pairs"]]
    assert all(model["size_bytes"] > 0 and model["licence"] for model in listed)


def test_models_are_listed_one_variant_a_line_within_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[0].split() == ["bundle", "pair", "variant", "MB", "BLEU", "chrF", "licence"]
    manifest = json.loads((SHIPPED / MANIFEST_NAME).read_text())
    score = next(
        score
        for score in manifest["quality"]
        if (score["test_set"], score["variant"]) == ("flores200-dev", "cpu-int8")
    )
    num_bytes = sum(record["size_bytes"] for record in manifest["files"].values())
    assert [
        manifest["id"],
        "en-pt",
        "cpu-int8",
        f"{num_bytes / 1e6:.1f}",
        f"{score['bleu']:.1f}",
        f"{score['chrf']:.1f}",
        manifest["licence"],
    ] in [line.split() for line in lines]
    assert sum(" cpu-" in line for line in lines) == 4


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


def test_a_pair_that_is_missing_or_unnamed_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("translate", "-s", "en", "-t", "xx", "text") == 2
    assert "en to pt" in capsys.readouterr().err
    assert run("translate", "text") == 2
    assert "--source and --target" in capsys.readouterr().err


def test_a_missing_runtime_is_named_with_the_way_to_install_it() -> None:
    program = (
        "import sys; sys.modules['onnxruntime'] = None; from app.__main__ import main; "
        "main(['translate', '-s', 'en', '-t', 'pt', 'Hi'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "onnxruntime is not installed" in done.stderr
    assert "'.[cpu]'" in done.stderr
    assert "Traceback" not in done.stderr
