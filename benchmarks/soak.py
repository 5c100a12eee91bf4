"""Hours of use in minutes: many mixed requests to one server process, which must stay as it was.

    python -m benchmarks.soak [--requests 100000] [--clients 32] [--seed 1] [--json FILE]

Starts `dragoman serve` with the shipped models and sends what clients send: both directions and dialects,
single texts and lists, beams and other options, wrong, empty and too large requests, clients that leave and
clients with deadlines. The cache is kept small, so that it is full early and memory may be compared, and
so that a third of the requests are decoded; every row slot is used once before memory is measured. Exit
code 1 when anything that must hold does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from benchmarks.machine import num_usable_cores, this_machine
from benchmarks.soak_checks import Check, check_answers, check_end, check_metrics, check_process, growth
from benchmarks.soak_client import Account, run_clients
from benchmarks.soak_flood import flood
from benchmarks.soak_requests import soak_requests
from benchmarks.soak_server import SERVE, ProcessSample, SoakServer

_CACHE_BYTES_PER_REQUEST = 25
"""A third of the requests bring about 0.7 kB each: the cache is full after a tenth of them."""
_MIN_CACHE_BYTES = 65_536
_MAX_CACHE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class SoakOptions:
    """How long and how hard.

    Attributes:
        num_requests: to be sent.
        num_clients: connections at a time.
        seed: of the mix.
        sample_every_s: seconds between looks at the process.
        max_rows: of the server, all of which are used before anything is measured.
        command: of the server, with ``{port}`` where its port belongs.
    """

    num_requests: int = 100_000
    num_clients: int = 32
    seed: int = 1
    sample_every_s: float = 1.0
    max_rows: int = 64
    command: Sequence[str] = SERVE


@dataclass(frozen=True)
class SoakReport:
    """What came of it.

    Attributes:
        num_requests: sent.
        duration_s: of the load.
        max_cache_bytes: the server's setting.
        sent: requests by kind.
        answered: answers by path and status.
        checks: what must hold.
        samples: of the process, under load.
    """

    num_requests: int
    duration_s: float
    max_cache_bytes: int
    sent: dict[str, int]
    answered: dict[str, int]
    checks: list[Check]
    samples: list[ProcessSample]

    @property
    def failed(self) -> list[Check]:
        """What did not hold."""
        return [check for check in self.checks if not check.passed]


def soak(options: SoakOptions, *, on_done: Callable[[], None] = lambda: None) -> SoakReport:
    """Start a server, load it, look at it, stop it.

    Args:
        options: how long and how hard.
        on_done: called after each request.

    Raises:
        RuntimeError: the server did not start, or ended under load.
    """
    cache_bytes = min(
        max(_MIN_CACHE_BYTES, options.num_requests * _CACHE_BYTES_PER_REQUEST), _MAX_CACHE_BYTES
    )
    account = Account()
    environment = {
        "DRAGOMAN_MAX_CACHE_BYTES": str(cache_bytes),
        "DRAGOMAN_MAX_ROWS": str(options.max_rows),
        "DRAGOMAN_LOG_LEVEL": "warning",
        "DRAGOMAN_LOG_FORMAT": "json",
    }
    with SoakServer(options.command, environment=environment) as server:
        server.translate_first(flood(max_rows=options.max_rows, num_workers=num_usable_cores()))
        earlier = server.counts()
        before = server.sample()
        began_at_s = time.monotonic()
        samples = asyncio.run(_load(server, options, account, on_done))
        duration_s = time.monotonic() - began_at_s
        quiet = server.wait_until_quiet()
        counts = server.counts().since(earlier)
        after = server.sample()
        server.stop()
        log_text = server.log_text()
    checks = [
        *check_answers(account),
        *check_process(samples, before=before, after=after),
        *check_metrics(account, counts, quiet=quiet),
        *check_end(server.exit_code, log_text),
    ]
    answered = {f"{path} {status}": number for (path, status), number in sorted(account.answered.items())}
    return SoakReport(
        account.sent.total(),
        round(duration_s, 1),
        cache_bytes,
        dict(account.sent.most_common()),
        answered,
        checks,
        samples,
    )


async def _load(
    server: SoakServer, options: SoakOptions, account: Account, on_done: Callable[[], None]
) -> list[ProcessSample]:
    samples: list[ProcessSample] = []

    async def look() -> None:
        while True:
            samples.append(server.sample())
            await asyncio.sleep(options.sample_every_s)

    looking = asyncio.create_task(look())
    load = asyncio.create_task(
        run_clients(
            server.port,
            soak_requests(options.num_requests, seed=options.seed),
            num_clients=options.num_clients,
            account=account,
            on_done=on_done,
        )
    )
    # The look ends by itself only when the server is gone, and then the load must not go on.
    await asyncio.wait({looking, load}, return_when=asyncio.FIRST_COMPLETED)
    for task in (looking, load):
        task.cancel()
    if looking.done():
        looking.result()
    await load
    return samples


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Show the rate, once it is known."""
        return Text("" if task.speed is None else f"{task.speed:.0f} requests/s")


def table(report: SoakReport) -> str:
    """The report as lines."""
    lines = [
        f"{report.num_requests} requests in {report.duration_s:g} s, "
        f"{report.num_requests / report.duration_s:.1f} a second; cache of {report.max_cache_bytes} bytes",
        "",
        *(f"  {kind:32s}{number:9d}" for kind, number in report.sent.items()),
        "",
        *(f"  {answer:32s}{number:9d}" for answer, number in report.answered.items()),
        "",
    ]
    if report.samples:
        rss = growth(report.samples, lambda sample: sample.rss_bytes)
        most = max(sample.rss_bytes for sample in report.samples)
        lines += [
            f"  memory, MB: {rss.warm / 1e6:.1f} after the warm-up, {rss.last / 1e6:.1f} at the end, "
            f"{most / 1e6:.1f} at most; connections at most "
            f"{max(sample.num_connections for sample in report.samples)}",
            "",
        ]
    lines += [
        f"  {'ok    ' if check.passed else 'FAILED'}  {check.name}: {check.detail}" for check in report.checks
    ]
    return "\n".join(lines)


def main() -> None:
    """Soak the service and print one table."""
    defaults = SoakOptions()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=defaults.num_requests)
    parser.add_argument("--clients", type=int, default=defaults.num_clients, help="connections at a time")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--sample-every", type=float, default=defaults.sample_every_s, help="seconds between looks"
    )
    parser.add_argument("--json", type=Path, help="write the report here")
    arguments = parser.parse_args()

    machine = this_machine().line()
    print(machine, flush=True)
    console = Console(stderr=True)
    with Progress(
        TextColumn("soaking"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("soaking", total=arguments.requests)
        report = soak(
            SoakOptions(arguments.requests, arguments.clients, arguments.seed, arguments.sample_every),
            on_done=lambda: progress.advance(bar),
        )
    print(table(report))
    if arguments.json:
        text = json.dumps({"machine": machine, **asdict(report)}, indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if report.failed:
        sys.exit(f"failed: {', '.join(check.name for check in report.failed)}")


if __name__ == "__main__":
    main()
