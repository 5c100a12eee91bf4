"""What a soak test must have shown, judged from its account, its samples and the server's metrics."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.soak_client import Account
from benchmarks.soak_server import Counts, ProcessSample

MAX_RSS_GROWTH = 0.02
MIN_DECODED_SHARE = 0.3
_MIN_SAMPLES = 20
_UNMATCHED = "unmatched"
_CLIENT_CLOSED_REQUEST = 499
_ROUTES = frozenset(
    {
        "/v1/translate",
        "/translate",
        "/v1/models",
        "/languages",
        "/livez",
        "/docs",
        "/openapi.json",
        _UNMATCHED,
    }
)
"""Those that the clients ask; the test itself asks others."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: what.
        passed: whether it held.
        detail: the figures it was judged by.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Growth:
    """Medians of a figure: of the tenth behind the first fifth of the samples, and of the last tenth."""

    warm: float
    last: float

    @property
    def share(self) -> float:
        """Growth relative to what there was after the warm-up."""
        return self.last / self.warm - 1


def growth(samples: Sequence[ProcessSample], figure: Callable[[ProcessSample], float]) -> Growth:
    """How a figure of the process grew."""
    tenth = max(1, len(samples) // 10)
    begin = len(samples) // 5
    return Growth(
        statistics.median(map(figure, samples[begin : begin + tenth])),
        statistics.median(map(figure, samples[-tenth:])),
    )


def check_answers(account: Account) -> list[Check]:
    """Every request got a right answer, and equal questions got equal ones."""
    return [
        Check("no lost answers", account.num_lost == 0, _listed(account.num_lost, account.lost)),
        Check(
            "right answers, no unexplained 5xx",
            account.num_wrong == 0,
            _listed(account.num_wrong, account.wrong),
        ),
        Check(
            "equal questions, equal answers",
            account.num_unequal == 0 and account.num_compared > 0,
            f"{account.num_unequal} of {account.num_compared} differ",
        ),
    ]


def check_process(
    samples: Sequence[ProcessSample], *, before: ProcessSample, after: ProcessSample
) -> list[Check]:
    """The process does not grow.

    Args:
        samples: taken under load.
        before: taken when the server was ready.
        after: taken when all clients had left.
    """
    if len(samples) < _MIN_SAMPLES:
        detail = f"{len(samples)} samples, at least {_MIN_SAMPLES} are needed; --sample-every is too long"
        return [Check("enough samples of the process", passed=False, detail=detail)]
    rss = growth(samples, lambda sample: sample.rss_bytes)
    files = growth(samples, lambda sample: sample.num_files)
    mapped = growth(samples, lambda sample: sample.mapped_bytes)
    # Threads that live for a moment come and go: the fewest at the end against the most before.
    tenth, begin = max(1, len(samples) // 10), len(samples) // 5
    threads_warm = max(sample.num_threads for sample in samples[: begin + tenth])
    threads_last = min(sample.num_threads for sample in samples[-tenth:])
    return [
        Check(
            f"memory grows by less than {MAX_RSS_GROWTH:.0%}",
            rss.share < MAX_RSS_GROWTH,
            f"{rss.warm / 1e6:.1f} MB after the warm-up, then {rss.last / 1e6:.1f} MB: {rss.share:+.2%}; "
            f"of it mapped files {mapped.warm / 1e6:.1f}, then {mapped.last / 1e6:.1f} MB",
        ),
        Check(
            "open files do not grow",
            files.last <= files.warm and after.num_files <= before.num_files,
            f"{files.warm:g}, then {files.last:g}; idle {before.num_files}, then {after.num_files}",
        ),
        Check(
            "threads do not grow",
            threads_last <= threads_warm,
            f"at most {threads_warm} until after the warm-up, at least {threads_last} at the end",
        ),
        Check("no connection is left", after.num_connections == 0, f"{after.num_connections}"),
    ]


def check_metrics(account: Account, counts: Counts, *, quiet: bool) -> list[Check]:
    """The server's counters tell what was sent.

    Args:
        account: what was sent.
        counts: what the server counted meanwhile.
        quiet: whether nothing was left waiting or running.
    """
    total = counts.totals
    finished, cancelled, expired, failed = (
        total.get(f"dragoman_segments_{what}_total", 0.0)
        for what in ("finished", "cancelled", "expired", "failed")
    )
    ended = finished + cancelled + expired + failed
    rows = total.get("dragoman_queue_seconds_count", 0.0)
    looked_up = sum(total.get(f"dragoman_cache_{what}_total", 0.0) for what in ("hits", "misses", "joined"))
    num_requests = account.sent.total()
    return [
        _check_requests(account, counts),
        Check("nothing waits or runs when all have left", quiet, "quiet" if quiet else "not quiet"),
        Check(
            # Cancelled and expired segments may have waited for their rows, or had them.
            "admitted = finished + cancelled + expired",
            failed == 0 and finished <= rows <= ended,
            f"{rows:.0f} got rows; {finished:.0f} + {cancelled:.0f} + {expired:.0f}, {failed:.0f} failed",
        ),
        Check(
            "cache lookups = segments sent",
            account.num_segments_answered <= looked_up <= account.num_segments_sent,
            f"{looked_up:.0f} of {account.num_segments_sent} sent, {account.num_segments_answered} answered",
        ),
        Check(
            f"segments decoded, at least {MIN_DECODED_SHARE:g} a request",
            finished >= MIN_DECODED_SHARE * num_requests,
            f"{finished:.0f} of {num_requests} requests",
        ),
    ]


def check_end(exit_code: int | None, log_text: str) -> list[Check]:
    """The process ended as it should, and had nothing to complain of."""
    ended = "had to be killed" if exit_code is None else f"exit code {exit_code}"
    lines = [line for line in log_text.splitlines() if "raceback" in line or '"level": "error"' in line]
    return [
        Check("clean exit on SIGTERM", exit_code == 0, ended),
        Check("no error in the log", not lines, _listed(len(lines), lines[:3])),
    ]


def _check_requests(account: Account, counts: Counts) -> Check:
    answered = {
        (path if path in _ROUTES else _UNMATCHED, status): number
        for (path, status), number in account.answered.items()
    }
    faults = []
    for route in sorted(_ROUTES):
        counted = {status: number for (path, status), number in counts.requests.items() if path == route}
        ours = {status: number for (path, status), number in answered.items() if path == route}
        beyond = {
            status: counted.get(status, 0) - ours.get(status, 0) for status in sorted({*counted, *ours})
        }
        num_left = account.left[route]
        # Who leaves is answered with 499, or with the translation if that was quicker.
        allowed = {200, _CLIENT_CLOSED_REQUEST} if num_left else set()
        if sum(beyond.values()) != num_left or any(
            number < 0 or (number and status not in allowed) for status, number in beyond.items()
        ):
            faults.append(f"{route}: {beyond} beyond the answers, {num_left} left")
    detail = (
        "; ".join(faults) or f"{sum(counts.requests[key] for key in counts.requests if key[0] in _ROUTES)}"
    )
    return Check("requests counted by route and code = requests sent", not faults, detail)


def _listed(number: int, examples: Sequence[str]) -> str:
    return "none" if not number else f"{number}: {'; '.join(examples)}"
