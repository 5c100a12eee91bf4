"""`dragoman evaluate`: scores of bundles, services and ready translations, beside one another."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional, get_args

import typer
from rich.console import Console

from app.bundle import MANIFEST_NAME, Bundle, Variant, open_bundle
from app.errors import InvalidOption
from model.evaluation.bundle_system import BundleSystem
from model.evaluation.evaluation import TestSetOutcome, evaluate, quality_scores
from model.evaluation.ready_system import ReadySystem
from model.evaluation.report import as_json, print_tables
from model.evaluation.service_system import (
    DEFAULT_CONCURRENCY,
    ServiceAddress,
    ServiceSystem,
    without_password,
)
from model.evaluation.significance import DEFAULT_NUM_SAMPLES
from model.evaluation.system import (
    DEFAULT_BEAM_SIZE,
    DEFAULT_LENGTH_PENALTY,
    Decoding,
    Languages,
    System,
)
from model.evaluation.testset import NAME_PATTERN, read_testset

app = typer.Typer(
    name="evaluate",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_console = Console(stderr=True)


@app.command()
def evaluate_command(
    systems: Annotated[
        list[str],
        typer.Argument(
            metavar="SYSTEM",
            help="A bundle's folder, the URL of a running service, or NAME=FILE of ready translations (a "
            "folder holds TEST_SET.txt); NAME= may precede the others too. All are compared with the first.",
        ),
    ],
    testset: Annotated[
        list[str],
        typer.Option(
            help="NAME=SOURCE_FILE,REFERENCE_FILE, line by line, or NAME=TABLE.tsv. May be repeated."
        ),
    ],
    source: Annotated[
        Optional[str],  # noqa: UP045  # typer reads the annotation at run time
        typer.Option("--source", "-s", help="Source language. Default: the bundles'."),
    ] = None,
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--target", "-t", help="Target language. Default: the bundles'."),
    ] = None,
    source_column: Annotated[int, typer.Option(help="Column of the sources in a table, from 1.")] = 1,
    target_column: Annotated[int, typer.Option(help="Column of the references in a table, from 1.")] = 2,
    max_lines: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Only so many first lines of each test set."),
    ] = None,
    variant: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="Graphs of the bundles to run; repeated, each counts as a system. Default: cpu-int8."
        ),
    ] = None,
    beam_size: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=1, help="Live beams; repeated, each counts as a system. Default: 1, greedy."),
    ] = None,
    length_penalty: Annotated[
        float, typer.Option(min=0, help="Exponent of beam search's length normalisation.")
    ] = DEFAULT_LENGTH_PENALTY,
    shortlist: Annotated[bool, typer.Option(help="Use the bundles' shortlists.")] = True,
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Decoding threads for bundles. Default: the usable cores."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Requests under way at a service.")
    ] = DEFAULT_CONCURRENCY,
    key_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="File that holds the API key of the services, on a line of its own."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=100, max=100_000, help="Samples of the paired bootstrap.")
    ] = DEFAULT_NUM_SAMPLES,
    json_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", help="Write everything but the translations to this file."),
    ] = None,
    outputs: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Keep the translations in this folder, as SYSTEM/TEST_SET.txt."),
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write the scores into the bundles' manifests and model cards.")
    ] = False,
) -> None:
    """Score systems on test sets and compare them with the first one.

    Bundles are translated by `dragoman translate`, services are asked over HTTP.
    """
    variants = _variants(variant)
    testsets = [
        read_testset(text, source_column=source_column, target_column=target_column) for text in testset
    ]
    if max_lines is not None:
        testsets = [part.first(max_lines) for part in testsets]
    key = None if key_file is None else _key(key_file)
    opened = [_Described.read(text, key=key) for text in systems]
    if key is not None and all(part.address is None for part in opened):
        raise InvalidOption("--key-file is for services, and no URL is given; leave it out, or name one")
    languages = _languages(opened, source, target)
    decodings = [Decoding(size, length_penalty) for size in beam_size or (DEFAULT_BEAM_SIZE,)]
    expanded = _expand(
        opened,
        languages,
        variants=variants,
        decodings=decodings,
        use_shortlist=shortlist,
        num_workers=workers,
        concurrency=concurrency,
    )
    if record:
        _check_record(expanded, is_cut=max_lines is not None)
    for part in opened:
        if len(testsets) > 1 and part.path is not None and part.path.is_file():
            raise InvalidOption(
                f"{part.path} is one file, but there are {len(testsets)} test sets; name a folder that holds "
                "TEST_SET.txt for each, as --outputs writes it"
            )
    if json_file is not None and json_file.is_dir():
        raise InvalidOption(f"--json {json_file} is a folder; name a file in it")
    if json_file is not None and not json_file.parent.is_dir():
        raise InvalidOption(f"{json_file.parent} is not a folder; make it, or name another --json")
    found = evaluate(expanded, testsets, num_samples=samples, outputs=outputs, console=_console)
    print_tables(found, Console())
    if json_file is not None:
        facts = as_json(found, languages=languages, num_samples=samples)
        json_file.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if record:
        _record(found)


@dataclass(frozen=True)
class _Described:
    """A system as the command line names it: exactly one of `bundle`, `address` and `path` is there."""

    name: str | None
    bundle: Bundle | None = None
    address: ServiceAddress | None = None
    path: Path | None = None

    @classmethod
    def read(cls, text: str, *, key: str | None) -> _Described:
        """Tell which kind it is.

        Raises:
            InvalidOption: it is none, or a URL that cannot be understood.
            BundleError: it is a bundle that cannot be opened.
        """
        name, value = _split(text)
        if "://" in value:
            return cls(name, address=ServiceAddress.read(value, key=key))
        path = Path(value)
        if (path / MANIFEST_NAME).is_file():
            # Its files are checked by `dragoman translate`, which reads them.
            return cls(name, bundle=open_bundle(path, verify=False))
        if not path.exists():
            raise InvalidOption(
                f"{without_password(value)} is neither a bundle's folder, nor a URL, nor a file of "
                "translations"
            )
        if name is None:
            raise InvalidOption(
                f"{value} holds no {MANIFEST_NAME}, so it is no bundle; ready translations need a name: "
                f"NAME={value}"
            )
        return cls(name, path=path)


def _key(path: Path) -> str:
    """The API key in a file; a command line would show it to every user of the machine."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"--key-file {path} cannot be read as a key ({type(error).__name__})") from None
    if not key or not key.isprintable() or " " in key:
        raise InvalidOption(f"--key-file {path} does not hold one key; write the key alone into it")
    return key


def _split(text: str) -> tuple[str | None, str]:
    name, separator, value = text.partition("=")
    if separator and NAME_PATTERN.fullmatch(name) and not Path(text).exists():
        return name, value
    return None, text


def _languages(opened: Sequence[_Described], source: str | None, target: str | None) -> Languages | None:
    """The direction; None where only ready translations are scored.

    Raises:
        InvalidOption: it is not said, and the bundles do not agree on a single one.
    """
    if source is not None and target is not None:
        return Languages(source, target)
    if source is not None or target is not None:
        raise InvalidOption("--source and --target go together; give both or none")
    pairs = {
        (pair.source, pair.target)
        for part in opened
        if part.bundle is not None
        for pair in part.bundle.manifest.pairs
    }
    if len(pairs) == 1:
        return Languages(*pairs.pop())
    if pairs or any(part.address for part in opened):
        known = ", ".join(f"{first} to {second}" for first, second in sorted(pairs)) or "not known"
        raise InvalidOption(f"name the languages with --source and --target; the bundles' are {known}")
    return None


def _expand(
    opened: Sequence[_Described],
    languages: Languages | None,
    *,
    variants: Sequence[Variant],
    decodings: Sequence[Decoding],
    use_shortlist: bool,
    num_workers: int | None,
    concurrency: int,
) -> list[System]:
    """One system for each way a described one is to be run."""
    found: list[System] = []
    for part in opened:
        if part.bundle is not None:
            assert languages is not None
            for variant, decoding in itertools.product(variants, decodings):
                ways = [variant] if len(variants) > 1 else []
                found.append(
                    BundleSystem(
                        _name(part.name or part.bundle.manifest.id, ways, decoding, decodings),
                        part.bundle,
                        languages,
                        variant=variant,
                        use_shortlist=use_shortlist,
                        decoding=decoding,
                        num_workers=num_workers,
                    )
                )
        elif part.address is not None:
            assert languages is not None
            host = part.address.url.partition("://")[2]
            for decoding in decodings:
                name = _name(part.name or _safe(host), [], decoding, decodings)
                found.append(ServiceSystem(name, part.address, languages, decoding, concurrency=concurrency))
        else:
            assert part.name is not None
            assert part.path is not None
            found.append(ReadySystem(part.name, part.path))
    return found


def _name(name: str, ways: Sequence[str], decoding: Decoding, decodings: Sequence[Decoding]) -> str:
    beam = [f"beam-{decoding.beam_size}"] if len(decodings) > 1 else []
    return ".".join([name, *ways, *beam])


def _safe(host: str) -> str:
    """A service's address as a name of columns and folders."""
    return "".join(sign if NAME_PATTERN.fullmatch(f"x{sign}") else "-" for sign in host).lstrip(".-_")


def _variants(wanted: Sequence[str] | None) -> list[Variant]:
    known: tuple[Variant, ...] = get_args(Variant)
    for name in wanted or ():
        if name not in known:
            raise InvalidOption(f"--variant is {name}; known are {', '.join(known)}")
    return [variant for variant in known if variant in (wanted or ["cpu-int8"])]


def _check_record(systems: Sequence[System], *, is_cut: bool) -> None:
    """Refuse to record, before any work, what a manifest cannot state rightly."""
    bundles = [system for system in systems if isinstance(system, BundleSystem)]
    if not bundles:
        raise InvalidOption("--record is for bundles, and none is given; leave it out, or name one")
    if is_cut:
        raise InvalidOption("--record states scores of whole test sets; leave out --max-lines or --record")
    for system in bundles:
        if len(system.bundle.manifest.pairs) > 1:
            raise InvalidOption(
                f"bundle {system.bundle.manifest.id} has {len(system.bundle.manifest.pairs)} pairs, but a "
                "manifest's scores do not say of which they are; leave out --record"
            )


def _record(found: Sequence[TestSetOutcome]) -> None:
    # Here alone: all else of an evaluation does without the exporters, and so without PyTorch.
    from exporters.quality import add_quality

    for path, scores in quality_scores(found).items():
        bundle = add_quality(path, scores)
        num_all = len(bundle.manifest.quality)
        _console.print(
            f"{len(scores)} scores recorded in {bundle.path}, {num_all} in all",
            soft_wrap=True,
            highlight=False,
        )
