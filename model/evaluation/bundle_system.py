"""A bundle, translated by the product: `dragoman translate` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

import app
from app.bundle import Bundle, Variant
from app.errors import BundleError, InvalidOption, InvalidRequest
from model.evaluation.measures import Speed
from model.evaluation.system import Decoding, Languages, Translations
from model.evaluation.testset import TestSet, read_lines

_EXIT_USAGE = 2
_SPEED_COVERS = "from the first request to the last translation in `dragoman translate`, without loading"


class _Report(BaseModel):
    """What of `dragoman translate --report` is needed here."""

    model_config = ConfigDict(frozen=True, strict=True)

    num_lines: int
    num_target_tokens: int
    elapsed_s: float


@dataclass(frozen=True)
class BundleSystem:
    """A bundle and how it is run.

    Attributes:
        name: unique in the evaluation.
        bundle: opened; `dragoman translate` checks its files again.
        languages: the direction.
        variant: the graphs to run.
        use_shortlist: restrict the output to the bundle's shortlist, if it has one.
        decoding: how to search.
        num_workers: decoding threads; None leaves it to the product.
    """

    name: str
    bundle: Bundle
    languages: Languages
    variant: Variant
    use_shortlist: bool
    decoding: Decoding
    num_workers: int | None = None

    @property
    def has_shortlist(self) -> bool:
        """Whether its translations are restricted to a shortlist."""
        return self.use_shortlist and self.bundle.manifest.shortlist is not None

    @property
    def facts(self) -> dict[str, object]:
        """What was run."""
        return {
            "kind": "bundle",
            "bundle": self.bundle.manifest.id,
            "path": str(self.bundle.path),
            "variant": self.variant,
            "shortlist": self.has_shortlist,
            "beam_size": self.decoding.beam_size,
            "length_penalty": self.decoding.length_penalty,
        }

    def check(self, testset: TestSet) -> None:  # noqa: ARG002  # any text can be translated
        """Refuse a variant that the bundle has not.

        Raises:
            InvalidOption: as said.
        """
        manifest = self.bundle.manifest
        if self.variant not in manifest.variants:
            raise InvalidOption(
                f"bundle {manifest.id} has no variant {self.variant}; it has {', '.join(manifest.variants)}"
            )

    def translate(self, testset: TestSet) -> Translations:
        """Translate by the product, whose progress bar and remarks go to standard error.

        Raises:
            InvalidRequest: the product found the call wrong, in its own words.
            BundleError: it failed otherwise, in its own words.
        """
        with tempfile.TemporaryDirectory(prefix="dragoman-evaluate-") as folder:
            source, output, report = (Path(folder) / name for name in ("source", "output", "report"))
            source.write_bytes("".join(f"{line}\n" for line in testset.sources).encode())
            self._run(self._arguments(source, output, report), about=testset.name)
            figures = _Report.model_validate_json(report.read_bytes())
            lines = read_lines(output)
        if len(lines) != len(testset.sources):
            raise BundleError(
                f"{self.name} made {len(lines)} lines of the {len(testset.sources)} of test set "
                f"{testset.name}; this is a fault of `dragoman translate`, report it"
            )
        speed = Speed(figures.elapsed_s, figures.num_lines, figures.num_target_tokens, _SPEED_COVERS)
        return Translations(tuple(lines), speed)

    def _arguments(self, source: Path, output: Path, report: Path) -> list[str]:
        arguments = {
            "--bundle": self.bundle.path.resolve(),
            "--source": self.languages.source,
            "--target": self.languages.target,
            "--variant": self.variant,
            # Whatever the environment says: a variant runs on one kind of device.
            "--device": "cuda" if self.variant.startswith("cuda") else "cpu",
            "--beam-size": self.decoding.beam_size,
            "--length-penalty": self.decoding.length_penalty,
            "--input": source,
            "--output": output,
            "--report": report,
        }
        if self.num_workers is not None:
            arguments["--workers"] = self.num_workers
        return [
            *(str(part) for option in arguments.items() for part in option),
            "--shortlist" if self.use_shortlist else "--no-shortlist",
        ]

    def _run(self, arguments: list[str], *, about: str) -> None:
        # On a terminal the product draws its own progress bar, for which it must own the terminal.
        shows = sys.stderr.isatty()
        if shows:
            print(f"{self.name} translates {about}", file=sys.stderr)
        done = subprocess.run(
            # -P: a folder `app` where the user happens to be must not be taken for the product.
            [sys.executable, "-P", "-m", "app", "translate", *arguments],
            env=os.environ | {"PYTHONPATH": _import_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if shows else subprocess.PIPE,
            check=False,
        )
        words = "" if done.stderr is None else done.stderr.decode("utf-8", "replace").strip()
        if done.returncode == 0:
            if words:
                print(f"{self.name}, {about}: {words}", file=sys.stderr)
            return
        kind = InvalidRequest if done.returncode == _EXIT_USAGE else BundleError
        raise kind(
            f"{self.name} could not translate test set {about} (`dragoman translate` ended with "
            f"{done.returncode}): {words.removeprefix('dragoman: ') or 'its words are above'}"
        )


def _import_path() -> str:
    """The folder this process has the product from, before whatever the environment names."""
    paths = [str(Path(app.__file__ or "").resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)
