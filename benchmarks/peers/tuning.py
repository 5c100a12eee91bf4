"""The other side at its best: every batch size and CPU setting is tried before anything counts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from benchmarks.contest import Run
from benchmarks.machine import Machine
from benchmarks.peers.ctranslate2_process import CTranslate2Process, PeerJob

BATCH_SIZES = (32, 64, 128)
_FORCE_ISA = "CT2_FORCE_CPU_ISA"


@dataclass(frozen=True)
class TunedJob:
    """A job in its best setting.

    Attributes:
        run: does it once.
        setting: the setting, and what the others reached, for the report.
    """

    run: Callable[[], Run]
    setting: str


class TunedCTranslate2:
    """One process for every CPU setting worth trying; a context manager.

    CTranslate2 takes AVX-512 only when CT2_FORCE_CPU_ISA asks for it, so where the CPU has it both
    are tried.
    """

    def __init__(self, machine: Machine) -> None:
        """Choose the settings for this machine."""
        environments: list[dict[str, str]] = [{}, *([{_FORCE_ISA: "AVX512"}] if machine.avx512 else [])]
        self._processes = [CTranslate2Process(environment) for environment in environments]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> TunedCTranslate2:
        """Start the processes."""
        for process in self._processes:
            self._stack.enter_context(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes."""
        self._stack.close()

    def tune(self, job: PeerJob, *, batch_sizes: Sequence[int] = BATCH_SIZES) -> TunedJob:
        """Run the job once in each setting and keep the fastest; one by one, only CPU settings differ."""
        best: tuple[float, CTranslate2Process, int] | None = None
        tried: list[str] = []
        for process in self._processes:
            for batch_size in worth_trying(job, batch_sizes):
                number = process.prepare(job.with_batch_size(batch_size))
                rate = _rate(process.run(number))
                isa = process.environment.get(_FORCE_ISA, "default ISA")
                tried.append(f"{isa}, batches of {batch_size}: {rate:.0f}/s")
                if best is None or rate > best[0]:
                    if best is not None:
                        best[1].forget(best[2])
                    best = rate, process, number
                else:
                    process.forget(number)
        assert best is not None  # there is always a process, and a size worth trying
        _, chosen, chosen_number = best
        return TunedJob(lambda: chosen.run(chosen_number), "; ".join(tried))


def worth_trying(job: PeerJob, batch_sizes: Sequence[int]) -> list[int]:
    """Batch sizes that give every replica a batch; the smallest if none does, and 1 for one by one."""
    if job.one_by_one:
        return [1]
    num_sentences = sum(len(batch.tokens) for batch in job.batches)
    return [size for size in batch_sizes if size * job.num_threads <= num_sentences] or [min(batch_sizes)]


def _rate(run: Run) -> float:
    return run.num_tokens / run.wall_s
