"""The service under load over HTTP, beside its engine offline and CTranslate2 servers with the same weights.

    pip install ctranslate2
    python -m benchmarks.load --student FILE.npz --testsets DIR [--quick] [--json FILE]

Every server is a process of its own on the same cores, greedy, int8; ours and the micro-batching one with a
shortlist (CTranslate2: its vmap). Closed loops of 1, 8, 32 and 128 clients, then Poisson arrivals at 50, 80
and 120 % of what each server could do; one sentence a request; the servers take turns within a round, figures
are medians over the rounds. The client is a process too, and what it can do at most is measured first.
Without a student the shipped EN-PT bundle is measured alone.

A translation cache would answer from memory, since sentences come again: it is switched off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.bundle import default_directory
from app.settings import PREFIX, Settings
from benchmarks.finite import finite
from benchmarks.load_figures import LoadFigures
from benchmarks.load_offline import Saturated
from benchmarks.load_processes import JsonChild, Server, ServerSpec, parse_cores
from benchmarks.load_report import Shipped, ceiling_line, load_table, shipped_line, summary
from benchmarks.load_rounds import FULL, QUICK, Load, Plan, Rounds, ServerResult, bodies_of, in_random_order
from benchmarks.machine import Machine, this_machine
from benchmarks.testsets import load as load_testset

_FIRST_TEXT = "Thank you."
_CEILING_CLIENTS = 32
_CEILING_S = 2.0
_SHIPPED_S = 4.0
_CACHE_SETTING = "max_cache_bytes"


@dataclass(frozen=True)
class Models:
    """The weights of a run.

    Attributes:
        bundle: ours.
        ctranslate2: the other side's folder, or None for no other side.
        tokenizer: SentencePiece model of both.
    """

    bundle: Path
    ctranslate2: Path | None
    tokenizer: Path


@dataclass(frozen=True)
class Report:
    """Everything that was measured."""

    machine: Machine
    command: dict[str, str]
    plan: Plan
    client_ceiling: LoadFigures
    offline: Saturated
    servers: list[ServerResult]
    shipped: Shipped
    elapsed_s: float


def main() -> None:
    """Export, start everything, measure, print the tables."""
    arguments = _arguments()
    started_at_s = time.monotonic()
    plan = QUICK if arguments.quick else FULL
    if arguments.rounds:
        plan = replace(plan, num_rounds=arguments.rounds)
    machine = this_machine()
    print(machine.line(), flush=True)
    texts = in_random_order(
        load_testset(arguments.testsets, "flores200-dev", source="en", target="pt").sources, plan.num_texts
    )
    bodies = bodies_of(texts)
    cores, client_cores = arguments.cores, arguments.client_cores or arguments.cores
    with contextlib.ExitStack() as stack:
        models = _models(arguments, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        client = stack.enter_context(JsonChild("benchmarks.load_client", [], client_cores))
        load = Load(client, bodies, plan)
        ceiling = _ceiling(load, cores)
        shipped = _shipped(load, cores, plan, arguments.set)
        offline = stack.enter_context(
            JsonChild("benchmarks.load_offline", ["--bundle", str(models.bundle)], cores)
        )
        offline.ask({"prepare": {"texts": texts, "threads": len(cores)}})
        servers = [
            stack.enter_context(Server(spec, cores, first_body=_first_body()))
            for spec in _specs(models, cores, arguments.set, arguments.peer_env)
        ]
        with _progress() as progress:
            rounds = Rounds(load, servers, offline, plan, lambda _: None)
            task = progress.add_task("", total=rounds.num_runs)
            rounds = replace(rounds, progress=lambda text: progress.update(task, advance=1, description=text))
            results, saturated = rounds.measure()
        # Before the servers end: a first answer that turns out to be wrong must not cost the figures.
        elapsed_s = time.monotonic() - started_at_s
        if arguments.json:
            command = {key: str(value) for key, value in vars(arguments).items()}
            report = Report(machine, command, plan, ceiling, saturated, results, shipped, elapsed_s)
            arguments.json.write_text(
                json.dumps(finite(asdict(report)), indent=2, allow_nan=False) + "\n", encoding="utf-8"
            )
        print(f"\n{load_table(results)}\n\n{summary(results, saturated)}")
        print(f"{shipped_line(shipped)}\n{ceiling_line(ceiling)}")
        print(f"{elapsed_s:.0f} s in all")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every_core = frozenset(os.sched_getaffinity(0))
    parser.add_argument("--testsets", type=Path, required=True, help="folder with flores200-dev and pud")
    parser.add_argument("--student", type=Path, help="the student's .npz; needs ctranslate2")
    parser.add_argument("--models", type=Path, help="folder for the exported student, used again if there")
    parser.add_argument("--quick", action="store_true", help="fewer sentences and rounds: under 5 minutes")
    parser.add_argument("--rounds", type=int, help="another number of rounds")
    parser.add_argument(
        "--cores", type=parse_cores, default=every_core, help="of every server, as 0,1 or 0-3"
    )
    parser.add_argument("--client-cores", type=parse_cores, help="of the client; default: the servers'")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help=f"{PREFIX}NAME of our service"
    )
    parser.add_argument(
        "--peer-env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="environment of the other side, such as CT2_FORCE_CPU_ISA=AVX512, which is never its default",
    )
    parser.add_argument("--json", type=Path, help="write every figure here")
    return parser.parse_args()


def _models(arguments: argparse.Namespace, temporary: Path) -> Models:
    if arguments.student is None:
        bundle = default_directory() / "en-pt"
        return Models(bundle, None, bundle)
    folder = (arguments.models or temporary) / "student"
    models = Models(folder / "bundle", folder / "ct2-int8", folder / "tokenizer")
    if not (folder / "complete").exists():
        # PyTorch and the exporters are needed here alone.
        from benchmarks.student import read_student
        from benchmarks.twin_models import export_student

        print("exporting the student for both sides", flush=True)
        calibration = load_testset(arguments.testsets, "pud", source="en", target="pt").sources[:200]
        folder.mkdir(parents=True)
        export_student(read_student(arguments.student), folder, calibration)
        (folder / "complete").touch()
    return models


def _specs(
    models: Models, cores: Collection[int], own_settings: Sequence[str], peer_environment: Sequence[str]
) -> list[ServerSpec]:
    specs = [_our_spec("dragoman", own_settings, ["--bundles", str(models.bundle)])]
    if models.ctranslate2 is not None:
        arguments = ["--model", str(models.ctranslate2), "--tokenizer", str(models.tokenizer)]
        arguments += ["--replicas", str(len(cores))]
        module, environment = "benchmarks.peers.ctranslate2_server", _pairs(peer_environment)
        specs += [
            ServerSpec("CTranslate2", module, arguments, environment),
            ServerSpec("CT2 batching, vmap", module, [*arguments, "--micro-batch", "--vmap"], environment),
        ]
    return specs


def _our_spec(name: str, settings: Sequence[str], arguments: Sequence[str] = ()) -> ServerSpec:
    chosen = {f"{PREFIX}LOG_LEVEL": "warning"}
    if _CACHE_SETTING in Settings.model_fields:
        chosen[f"{PREFIX}{_CACHE_SETTING.upper()}"] = "0"
    chosen |= {f"{PREFIX}{key.upper()}": value for key, value in _pairs(settings).items()}
    return ServerSpec(name, "app", ["serve", *arguments], chosen)


def _ceiling(load: Load, cores: Collection[int]) -> LoadFigures:
    spec = ServerSpec("nothing", "benchmarks.load_trivial_server")
    with Server(spec, cores, first_body=_first_body()) as server:
        load.closed(server, _CEILING_CLIENTS, duration_s=_CEILING_S / 2)
        return load.closed(server, _CEILING_CLIENTS, duration_s=_CEILING_S)[0]


def _shipped(load: Load, cores: Collection[int], plan: Plan, settings: Sequence[str]) -> Shipped:
    startup_s: list[float] = []
    for index in range(plan.num_starts):
        with Server(_our_spec("shipped", settings), cores, first_body=_first_body()) as server:
            startup_s.append(server.startup_s)
            if index == plan.num_starts - 1:
                rss_idle_mb = server.rss_mb()
                figures, _ = load.closed(server, 32, duration_s=_SHIPPED_S)
    return Shipped(startup_s, statistics.median(startup_s), rss_idle_mb, figures)


def _first_body() -> str:
    return bodies_of([_FIRST_TEXT])[0]


def _pairs(items: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (item.partition("=") for item in items)}


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """On standard error, and only in a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield progress


if __name__ == "__main__":
    main()
