"""How much `benchmarks.gpu_check` measures, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.gpu_peaks import Peaks
from benchmarks.gpu_speed import Latency, Rate, Shares
from benchmarks.gpu_tokens import SentenceAgreement, StepAgreement
from benchmarks.machine import Machine
from benchmarks.peers.gpu_peers import PeerRate

BEAM_SIZE = 4


@dataclass(frozen=True)
class GpuPlan:
    """How much is measured.

    Attributes:
        rows: row counts of a step; beams of 4 have a quarter as many sentences.
        graph_rows: row counts measured without CUDA graphs too.
        min_s: seconds of each throughput.
        num_shipped: sentences of each shipped model; None is all.
        num_random: sentences of the random model whose tokens are compared.
        num_alone: sentences translated alone for the latency.
        matrix_size: of the product that measures the device's peak.
        vector_size: elements of the addition that measures its bandwidth.
    """

    rows: Sequence[int]
    graph_rows: Sequence[int]
    min_s: float
    num_shipped: int | None
    num_random: int
    num_alone: int
    matrix_size: int
    vector_size: int


FULL = GpuPlan(
    rows=(1, 32, 256, 1024),
    graph_rows=(1, 8, 32, 256),
    min_s=1.5,
    num_shipped=None,
    num_random=64,
    num_alone=40,
    matrix_size=8192,
    vector_size=1 << 28,
)
TINY = GpuPlan(
    rows=(1, 4),
    graph_rows=(1,),
    min_s=0.02,
    num_shipped=2,
    num_random=3,
    num_alone=2,
    matrix_size=32,
    vector_size=1024,
)


@dataclass(frozen=True)
class GpuFacts:
    """What the device is.

    Attributes:
        device: as the settings name it.
        name: the product's, or the CPU's.
        driver: the newest CUDA that the driver runs, or empty.
        compute_capability: or empty.
        memory_bytes: of the GPU, or 0.
        onnxruntime: version and providers.
    """

    device: str
    name: str
    driver: str
    compute_capability: str
    memory_bytes: int
    onnxruntime: str


@dataclass
class GpuReport:
    """Everything that was measured; what was not is under `missing`, with the reason.

    Attributes:
        machine: where.
        facts: of the device.
        size: of the random model.
        plan: how much was asked for.
        steps: greedy steps beside the CPU's float32 graphs, by model.
        sentences: whole translations beside those, by model.
        alone: the same sentences alone and in company, on the device, by model.
        peaks: of the device.
        latency: of one sentence of 25 tokens, with CUDA graphs.
        rates: of the random model.
        shares: of the rates, in their order, where the peaks are known.
        without_graphs: rates without CUDA graphs.
        peers: other engines' rates.
        used_bytes: of the GPU's memory, by what was loaded.
        row_bytes: of the runner's row slots, by rows.
        missing: what was not measured and why.
        elapsed_s: of the whole check.
    """

    machine: Machine
    facts: GpuFacts
    size: str
    plan: GpuPlan
    steps: dict[str, StepAgreement] = field(default_factory=dict)
    sentences: dict[str, SentenceAgreement] = field(default_factory=dict)
    alone: dict[str, SentenceAgreement] = field(default_factory=dict)
    peaks: Peaks | None = None
    latency: Latency | None = None
    rates: list[Rate] = field(default_factory=list)
    shares: list[Shares] = field(default_factory=list)
    without_graphs: list[Rate] = field(default_factory=list)
    peers: list[PeerRate] = field(default_factory=list)
    used_bytes: dict[str, int] = field(default_factory=dict)
    row_bytes: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    elapsed_s: float = 0.0

    @property
    def wrong(self) -> list[str]:
        """Which checks of tokens did not hold, and which parts failed."""
        found = [f"steps of {name}" for name, result in self.steps.items() if not result.passed]
        found += [f"alone and in company: {name}" for name, result in self.alone.items() if not result.passed]
        found += self.failed
        if not self.steps:
            found.append("no tokens were compared")
        return found
