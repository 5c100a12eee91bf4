"""The rounds of the load benchmark: every load for every server in turn, again and again."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.latency import poisson_arrivals
from benchmarks.load_client import Job, JobResult, result_from
from benchmarks.load_figures import (
    Cost,
    LoadFigures,
    OneClient,
    Overload,
    figures_of,
    median_of,
    one_client,
    overload,
)
from benchmarks.load_offline import ROW_COUNTS, Saturated
from benchmarks.load_processes import JsonChild, Server

PATH = "/v1/translate"
_SEED = 20_26
_WARM_UP_CLIENTS = 32
BELOW, BEYOND = 0.8, 1.2
"""Shares of capacity whose latencies are compared."""


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        num_rounds: of everything.
        closed_s: seconds of a closed loop.
        open_s: seconds of Poisson arrivals.
        warm_up_s: seconds of 32 clients before anything counts, for each server.
        num_texts: of the test set, in a fixed random order; None is all.
        num_alone: of those, by the bare engine one by one.
        num_starts: of the shipped service.
        clients: closed loops.
        shares: of a server's own capacity, for Poisson arrivals; 0.8 and 1.2 are among them.
        timeout_s: seconds after which a client gives up.
    """

    num_rounds: int
    closed_s: float
    open_s: float
    warm_up_s: float
    num_texts: int | None
    num_alone: int
    num_starts: int
    clients: Sequence[int] = (1, 8, 32, 128)
    shares: Sequence[float] = (0.5, BELOW, BEYOND)
    timeout_s: float = 60.0


QUICK = Plan(num_rounds=2, closed_s=3.0, open_s=4.0, warm_up_s=1.5, num_texts=250, num_alone=30, num_starts=2)
FULL = Plan(
    num_rounds=5, closed_s=12.0, open_s=20.0, warm_up_s=6.0, num_texts=None, num_alone=100, num_starts=5
)


@dataclass(frozen=True)
class ServerResult:
    """What one server came to.

    Attributes:
        name: its name.
        startup_s: from starting the process to the first right answer.
        loads: medians over the rounds, closed loops first.
        capacity_per_s: requests a second of its best closed loop, to which the shares refer.
        overload: how it holds beyond that.
        share_of_offline: requests a second in each closed loop by those of the offline engine, by load;
            empty for the other side's servers.
        one_client: where a lone client's time goes; None for the other side's servers.
    """

    name: str
    startup_s: float
    loads: list[LoadFigures]
    capacity_per_s: float
    overload: Overload
    share_of_offline: dict[str, float]
    one_client: OneClient | None


class Load:
    """Sends loads from the client process to servers."""

    def __init__(self, client: JsonChild, bodies: Sequence[str], plan: Plan) -> None:
        """Take the client and what it sends."""
        self._client = client
        self._bodies = bodies
        self._plan = plan

    def closed(self, server: Server, num_clients: int, *, duration_s: float) -> tuple[LoadFigures, JobResult]:
        """Clients that send their next request when they have an answer."""
        result, cost = self._run(server, self._job(server, num_clients=num_clients, duration_s=duration_s))
        load = f"{num_clients} client{'s' * (num_clients > 1)}"
        figures = figures_of(load, result, cost, window_s=duration_s, num_offered=len(result.samples))
        return figures, result

    def poisson(self, server: Server, share: float, *, capacity_per_s: float, seed: int) -> LoadFigures:
        """Requests that come at random, whatever became of those before."""
        arrivals_s = poisson_arrivals(share * capacity_per_s, self._plan.open_s, seed=seed)
        result, cost = self._run(server, self._job(server, arrivals_s=arrivals_s))
        return figures_of(
            load_name(share), result, cost, window_s=self._plan.open_s, num_offered=len(arrivals_s)
        )

    def _job(
        self,
        server: Server,
        *,
        num_clients: int = 0,
        duration_s: float = 0.0,
        arrivals_s: Sequence[float] = (),
    ) -> Job:
        return Job(
            port=server.port,
            path=PATH,
            bodies=self._bodies,
            timeout_s=self._plan.timeout_s,
            num_clients=num_clients,
            duration_s=duration_s,
            arrivals_s=arrivals_s,
        )

    def _run(self, server: Server, job: Job) -> tuple[JobResult, Cost]:
        cpu_before_s = server.cpu_s()
        result = result_from(self._client.ask(asdict(job)))
        return result, Cost(server.cpu_s() - cpu_before_s, server.rss_mb())


@dataclass(frozen=True)
class Rounds:
    """All rounds of some servers; the offline engine is that of the first one.

    Attributes:
        load: sends the loads.
        servers: running; the first is ours.
        offline: its engine, prepared.
        plan: how much.
        progress: told before every run.
    """

    load: Load
    servers: Sequence[Server]
    offline: JsonChild
    plan: Plan
    progress: Callable[[str], None]

    @property
    def num_runs(self) -> int:
        """How often `progress` is told something."""
        loads = len(self.plan.clients) + len(self.plan.shares)
        offline = len(ROW_COUNTS) + 1 + 2 * self.plan.num_rounds
        return len(self.servers) * (1 + self.plan.num_rounds * loads) + offline

    def measure(self) -> tuple[list[ServerResult], Saturated]:
        """Warm up, then closed loops and the offline engine in turns, then Poisson arrivals.

        Returns:
            The servers' results and the median of the offline engine in its best setting.
        """
        for server in self.servers:
            self.progress(f"{server.spec.name}: warming up")
            self.load.closed(server, _WARM_UP_CLIENTS, duration_s=self.plan.warm_up_s)
        max_rows = self._best_rows()
        closed: dict[tuple[str, int], list[LoadFigures]] = {}
        alone: list[JobResult] = []
        saturated: list[Saturated] = []
        engine_s: list[list[float | None]] = []
        for round_index in range(self.plan.num_rounds):
            self.progress(f"round {round_index + 1}: our engine offline")
            saturated.append(Saturated(**self.offline.ask({"saturated": max_rows})))
            self.progress(f"round {round_index + 1}: our engine, one sentence at a time")
            engine_s.append(self.offline.ask({"alone": self.plan.num_alone})["seconds"])
            for num_clients, server in itertools.product(self.plan.clients, self._in_turn(round_index)):
                self.progress(f"round {round_index + 1}: {server.spec.name}, {num_clients} clients")
                figures, result = self.load.closed(server, num_clients, duration_s=self.plan.closed_s)
                closed.setdefault((server.spec.name, num_clients), []).append(figures)
                if num_clients == 1 and server is self.servers[0]:
                    alone.append(result)
        closed_loads = {
            server.spec.name: [median_of(closed[server.spec.name, num]) for num in self.plan.clients]
            for server in self.servers
        }
        for name, loads in closed_loads.items():
            if capacity_of(loads) == 0:
                errors = "; ".join(f"{figures.load}: {figures.errors}" for figures in loads)
                raise RuntimeError(f"{name} translated nothing in time, whatever the load: {errors}")
        poisson = self._poisson(closed_loads)
        offline = Saturated(
            statistics.median(run.requests_per_s for run in saturated),
            statistics.median(run.tokens_per_s for run in saturated),
            max_rows,
        )
        lone = None
        if alone:
            samples = [sample for result in alone for sample in result.samples]
            lone = one_client(samples, medians_by_text(engine_s))
        results = [
            self._result(server, closed_loads[server.spec.name], poisson[server.spec.name], offline, lone)
            for server in self.servers
        ]
        return results, offline

    def _best_rows(self) -> int:
        rates: dict[int, float] = {}
        for max_rows in ROW_COUNTS:
            self.progress(f"our engine offline, {max_rows} rows")
            rates[max_rows] = self.offline.ask({"saturated": max_rows})["requests_per_s"]
        self.progress("our engine offline: settled")
        return max(rates, key=rates.__getitem__)

    def _in_turn(self, round_index: int) -> list[Server]:
        """The servers, another one first in each round."""
        first = round_index % len(self.servers)
        return [*self.servers[first:], *self.servers[:first]]

    def _poisson(self, closed_loads: Mapping[str, Sequence[LoadFigures]]) -> dict[str, list[LoadFigures]]:
        found: dict[tuple[str, float], list[LoadFigures]] = {}
        for round_index in range(self.plan.num_rounds):
            for share, server in itertools.product(self.plan.shares, self._in_turn(round_index)):
                name = server.spec.name
                self.progress(f"round {round_index + 1}: {name}, {load_name(share)}")
                figures = self.load.poisson(
                    server, share, capacity_per_s=capacity_of(closed_loads[name]), seed=_SEED + round_index
                )
                found.setdefault((name, share), []).append(figures)
        return {
            server.spec.name: [median_of(found[server.spec.name, share]) for share in self.plan.shares]
            for server in self.servers
        }

    def _result(
        self,
        server: Server,
        closed: Sequence[LoadFigures],
        poisson: Sequence[LoadFigures],
        offline: Saturated,
        lone: OneClient | None,
    ) -> ServerResult:
        is_ours = server is self.servers[0]
        by_share = dict(zip(self.plan.shares, poisson, strict=True))
        return ServerResult(
            name=server.spec.name,
            startup_s=server.startup_s,
            loads=[*closed, *poisson],
            capacity_per_s=capacity_of(closed),
            overload=overload([*closed, *poisson], below=by_share[BELOW], beyond=by_share[BEYOND]),
            share_of_offline={
                figures.load: figures.requests_per_s / offline.requests_per_s for figures in closed
            }
            if is_ours
            else {},
            one_client=lone if is_ours else None,
        )


def capacity_of(closed: Sequence[LoadFigures]) -> float:
    """Requests a second of the best closed loop."""
    return max(figures.requests_per_s for figures in closed)


def load_name(share: float) -> str:
    """How a share of capacity is called."""
    return f"{share * 100:.0f} % of capacity"


def medians_by_text(rounds: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The median of each text's seconds over the rounds; None where no round has any."""
    medians: list[float | None] = []
    for of_text in zip(*rounds, strict=True):
        seconds = [value for value in of_text if value is not None]
        medians.append(statistics.median(seconds) if seconds else None)
    return medians


def bodies_of(texts: Sequence[str]) -> list[str]:
    """One request a text, English to Portuguese."""
    return [json.dumps({"texts": [text], "source": "en", "target": "pt"}) for text in texts]


def in_random_order(texts: Sequence[str], num_texts: int | None) -> list[str]:
    """So many of the texts, in an order that is the same every time."""
    chosen = random.Random(_SEED).sample(list(texts), len(texts))
    return chosen[:num_texts]
