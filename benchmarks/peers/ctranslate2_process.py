"""CTranslate2 in a process of its own: some of its settings are read once, when the library loads.

The child (this file run as a module) keeps prepared jobs and times its own runs, so neither the pipe nor the
parent's work is in its figures. Requests and answers are lines of JSON on its standard input and output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.contest import Run, timed
from benchmarks.workload import Workload

NUM_WARM_UP_SENTENCES = 4


@dataclass(frozen=True)
class PeerBatch:
    """Sentences with one limit.

    Attributes:
        tokens: pieces of each sentence, without the end-of-sentence.
        max_target_tokens: limit of each.
    """

    tokens: list[list[str]]
    max_target_tokens: int


@dataclass(frozen=True)
class PeerJob:
    """What the other side is asked to do, and how.

    Attributes:
        folder: model.
        batches: sentences; all are submitted at once unless `one_by_one`.
        beam_size: 1 is greedy.
        use_vmap: limit each batch's output to the vocabulary map.
        num_threads: replicas of one thread each.
        one_by_one: translate each sentence alone, after the one before.
        batch_size: most sentences a batch.
    """

    folder: str
    batches: list[PeerBatch]
    beam_size: int
    use_vmap: bool
    num_threads: int
    one_by_one: bool
    batch_size: int = 1

    def with_batch_size(self, batch_size: int) -> PeerJob:
        """The same with another batch size."""
        return replace(self, batch_size=batch_size)


def peer_job(
    folder: Path,
    workload: Workload,
    pieces: Sequence[str],
    *,
    beam_size: int,
    use_vmap: bool,
    num_threads: int,
    one_by_one: bool,
) -> PeerJob:
    """A workload as a job; arguments as in `PeerJob`, `pieces` is the vocabulary by id."""
    return PeerJob(
        folder=str(folder),
        batches=[
            PeerBatch([[pieces[token] for token in source[:-1]] for source in sources], limit)
            for limit, sources in workload.by_limit().items()
        ],
        beam_size=beam_size,
        use_vmap=use_vmap,
        num_threads=num_threads,
        one_by_one=one_by_one,
    )


class CTranslate2Process:
    """A child process with its own environment; a context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Name the variables to set beside the inherited ones."""
        self.environment = dict(environment)
        self._child: subprocess.Popen[str] | None = None

    def __enter__(self) -> CTranslate2Process:
        """Start the process."""
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        if self._child is not None:
            self._child.communicate()  # closes its standard input: it has nothing left to do
            self._child = None

    def prepare(self, job: PeerJob) -> int:
        """Load the model, warm it up, and keep the job; returns its number."""
        return int(self._ask({"prepare": asdict(job)})["job"])

    def run(self, job: int) -> Run:
        """Do a prepared job once."""
        return Run(**self._ask({"run": job}))

    def forget(self, job: int) -> None:
        """Drop a prepared job."""
        self._ask({"forget": job})

    def _ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        child = self._child
        if child is None or child.stdin is None or child.stdout is None:
            raise RuntimeError("the process of the other engine is not running; use it in a with-block")
        child.stdin.write(json.dumps(request) + "\n")
        child.stdin.flush()
        answer = child.stdout.readline()
        if not answer:
            raise RuntimeError(
                f"the process of the other engine ended with {child.wait()}; see its errors above"
            )
        return dict(json.loads(answer))


class PreparedJobs:
    """The child's side: jobs by number, and the translators that do them."""

    def __init__(self, load: Callable[[Path, int], Any]) -> None:
        """Start without jobs.

        Args:
            load: opens a model's folder with a number of threads.
        """
        self._load = load
        self._jobs: dict[int, PeerJob] = {}
        self._translators: dict[tuple[str, int], Any] = {}
        self._num_prepared = 0

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what one line of the parent asks."""
        if "prepare" in request:
            return {"job": self._prepare(request["prepare"])}
        if "forget" in request:
            del self._jobs[request["forget"]]
            return {}
        job = self._jobs[request["run"]]
        return asdict(timed(lambda: self._translate(job)))

    def _prepare(self, fields: dict[str, Any]) -> int:
        job = PeerJob(**{**fields, "batches": [PeerBatch(**batch) for batch in fields["batches"]]})
        self._translate(
            replace(
                job,
                batches=[
                    replace(batch, tokens=batch.tokens[:NUM_WARM_UP_SENTENCES]) for batch in job.batches[:2]
                ],
            )
        )
        self._num_prepared += 1
        self._jobs[self._num_prepared] = job
        return self._num_prepared

    def _translate(self, job: PeerJob) -> int:
        """Do the job; returns the target tokens of the best hypotheses."""
        translator = self._translator(job)
        options = {
            "beam_size": job.beam_size,
            "max_batch_size": job.batch_size,
            "use_vmap": job.use_vmap,
        }
        if job.one_by_one:
            answers = [
                (batch, translator.translate_batch([tokens], max_decoding_length=limit, **options)[0])
                for batch in job.batches
                for limit in [batch.max_target_tokens]
                for tokens in batch.tokens
            ]
        else:
            pending = [
                (
                    batch,
                    translator.translate_batch(
                        batch.tokens,
                        max_decoding_length=batch.max_target_tokens,
                        asynchronous=True,
                        **options,
                    ),
                )
                for batch in job.batches
            ]
            answers = [(batch, answer.result()) for batch, futures in pending for answer in futures]
        lengths = [(batch.max_target_tokens, len(answer.hypotheses[0])) for batch, answer in answers]
        # The end-of-sentence is not among the tokens; who reached the limit never chose it.
        return sum(length + (length < limit) for limit, length in lengths)

    def _translator(self, job: PeerJob) -> Any:
        key = job.folder, job.num_threads
        if key not in self._translators:
            self._translators[key] = self._load(Path(job.folder), job.num_threads)
        return self._translators[key]


def _serve() -> None:
    # The parent only talks to this process and does not need the library itself.
    from benchmarks.peers.ctranslate2_model import open_translator

    def load(folder: Path, num_threads: int) -> Any:
        return open_translator(folder, compute_type="int8", num_threads=num_threads)

    jobs = PreparedJobs(load)
    for line in sys.stdin:
        print(json.dumps(jobs.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    _serve()
