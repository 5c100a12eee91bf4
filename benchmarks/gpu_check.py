"""Everything that needs a GPU, in one command without a network; no part begins after 270 seconds.

    python -m benchmarks.gpu_check [--device cuda:0] [--models DIR] [--json FILE]
    python -m benchmarks.gpu_check --prepare --models DIR
    python -m benchmarks.gpu_check --device cpu --sizes tiny

Compares the tokens of the shipped models and of a random one of the base size with the CPU's float32
graphs, and each sentence alone with itself in company; measures tokens a second at 1 to 1,024 rows, greedy
and with 4 beams, the latency of a sentence, the shares of the device's measured peaks, what CUDA graphs gain,
and memory; beside CTranslate2 in float16 and PyTorch where they are installed. Prints a table and writes
JSON. Whatever is not measured is named with the reason. Exit code 1 when tokens are not what they must be,
or a part failed.

The random model is exported first, which needs the extra `train`; `--prepare` does only that, so that the
folder can be taken to a machine that has the extra `gpu` alone. On a CPU the same graphs run slowly as a
simulation: that tests this command, and is no measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnxruntime

from app.errors import DeviceUnavailable, DragomanError
from app.runtime.device import Device
from app.runtime.gpu.cuda_driver import CudaDriver, probe
from app.runtime.gpu.model import DeviceModel, load_device_model
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.onnx_model import load_model
from app.runtime.onnx_providers import cuda_provider_fault
from app.runtime.onnx_runner import OnnxRunner
from benchmarks.driven_lane import DrivenLane
from benchmarks.finite import finite
from benchmarks.gpu_models import CheckedModel, random_model, shipped_models
from benchmarks.gpu_peaks import measure_peaks
from benchmarks.gpu_plan import BEAM_SIZE, FULL, TINY, GpuFacts, GpuPlan, GpuReport
from benchmarks.gpu_report import gpu_table
from benchmarks.gpu_speed import latency_of, rate_of, shares_of
from benchmarks.gpu_tokens import compare_alone, compare_sentences, compare_steps
from benchmarks.machine import this_machine
from benchmarks.peers.gpu_peers import CTranslate2Device, NotMeasured, TorchDevice

_TOKENS_ROWS = 32
_ADMISSION_TOKENS = 1 << 16
_SEED = 20_26
_T = TypeVar("_T")


def main() -> int:
    """Check, measure, print."""
    arguments = _arguments()
    started_at_s = time.monotonic()
    plan = TINY if arguments.sizes == "tiny" else FULL
    with contextlib.ExitStack() as stack:
        folder = arguments.models or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            if arguments.prepare:
                _random_model(arguments.sizes, folder, plan)
                print(f"{arguments.sizes}: the model is in {folder}; take it along and give --models")
                return 0
            device, driver = _device(arguments.device)
            if arguments.json is not None:
                arguments.json.touch()  # a path that cannot be written must not cost the figures
        except (DragomanError, OSError) as error:
            print(f"gpu_check: {error}", file=sys.stderr)
            return 1
        report = GpuReport(this_machine(), _facts(device, driver), arguments.sizes, plan)
        check = _Check(report, device, driver, deadline_s=started_at_s + arguments.limit_s)
        check.run(folder)
        report.elapsed_s = time.monotonic() - started_at_s
        print(gpu_table(report))
        if arguments.json is not None:
            found = json.dumps(finite({**asdict(report), "wrong": report.wrong}), indent=2, allow_nan=False)
            arguments.json.write_text(found + "\n", encoding="utf-8")
        return 1 if report.wrong else 0


class _Check:
    """Fills a report, part by part: one that fails or has no time left does not cost the others."""

    def __init__(
        self, report: GpuReport, device: Device, driver: CudaDriver | None, *, deadline_s: float
    ) -> None:
        self._report = report
        self._plan = report.plan
        self._device = device
        self._driver = driver
        self._deadline_s = deadline_s

    def run(self, folder: Path) -> None:
        """All parts, the most telling first."""
        plan = self._plan
        shipped = self._part("the shipped models", partial(shipped_models, plan.num_shipped)) or []
        for checked in shipped:
            self._part(f"tokens of {checked.name}", partial(self._compare, checked), must=True)
        if not shipped:
            self._report.missing["tokens of the shipped models"] = "none has a variant cuda-fp16"
        base = self._part("the random model", partial(_random_model, self._report.size, folder, plan))
        if base is None:
            return
        self._part(f"tokens of {base.name}", partial(self._compare, base), must=True)
        self._part("peaks", self._measure_peaks)
        model = self._part(f"loading {base.name}", partial(self._load, base))
        if model is None:
            return
        self._part("latency of one sentence", partial(self._measure_latency, base, model))
        for rows in plan.rows:
            for beam_size in self._beam_sizes(rows):
                name = f"{rows} rows, beams {beam_size}"
                self._part(name, partial(self._measure_rate, base, model, rows, beam_size))
        self._part("without CUDA graphs", partial(self._measure_without_graphs, base))
        self._part("CTranslate2", partial(self._measure_ctranslate2, base))
        self._part("PyTorch", partial(self._measure_torch, base))

    def _part(self, name: str, measure: Callable[[], _T], *, must: bool = False) -> _T | None:
        if time.monotonic() > self._deadline_s:
            where = self._report.failed if must else self._report.missing
            where[name] = "the time was over; raise --limit-s"
            return None
        try:
            return measure()
        except NotMeasured as error:
            self._report.missing[name] = str(error)
        except ImportError as error:
            self._report.missing[name] = f"{error}; install the extra train, or --prepare the model elsewhere"
        except Exception as error:  # noqa: BLE001 - whatever breaks one part must not cost the others
            self._report.failed[name] = f"{type(error).__name__}: {error}"
        return None

    def _compare(self, checked: CheckedModel) -> None:
        """Tokens beside the CPU's float32 graphs, and alone beside in company."""
        manifest = checked.bundle.manifest
        reference = load_model(checked.bundle, variant="cpu-fp32", use_shortlist=False)
        model = self._load(checked)
        self._report.steps[checked.name] = compare_steps(
            OnnxRunner(reference, max_rows=_TOKENS_ROWS),
            DeviceRunner(model, max_rows=_TOKENS_ROWS),
            checked.sources,
            checked.limits,
            eos_id=manifest.tokens.eos_id,
            max_rows=_TOKENS_ROWS,
        )
        lane = self._lane(checked, model, _TOKENS_ROWS)
        if not checked.forced:
            # What random weights choose hangs on the last bit, so that only their steps tell anything.
            theirs = DrivenLane(
                manifest,
                OnnxRunner(reference, max_rows=_TOKENS_ROWS),
                max_rows=_TOKENS_ROWS,
                max_admission_tokens=_ADMISSION_TOKENS,
            ).translate(checked.sources, checked.limits)
            self._report.sentences[checked.name] = compare_sentences(
                lane.translate(checked.sources, checked.limits), theirs
            )
            self._report.alone[checked.name] = compare_alone(
                lane, checked.sources, checked.limits, seed=_SEED
            )

    def _measure_peaks(self) -> None:
        self._report.peaks = measure_peaks(
            self._device, matrix_size=self._plan.matrix_size, vector_size=self._plan.vector_size
        )

    def _measure_latency(self, base: CheckedModel, model: DeviceModel) -> None:
        self._report.latency = latency_of(
            self._lane(base, model, 1), base.sources, base.limits, num_sentences=self._plan.num_alone
        )

    def _measure_rate(self, base: CheckedModel, model: DeviceModel, rows: int, beam_size: int) -> None:
        report = self._report
        runner = DeviceRunner(model, max_rows=rows)
        rate = rate_of(
            self._lane_over(base, runner, rows),
            base.sources,
            base.limits,
            num_slots=rows // beam_size,
            beam_size=beam_size,
            min_s=self._plan.min_s,
        )
        report.rates.append(rate)
        report.row_bytes[f"{rows} rows, beams {beam_size}"] = runner.buffer_bytes
        if report.peaks is not None:
            padded = next(group.source_length for group in runner.groups)
            report.shares.append(
                shares_of(
                    rate,
                    base.bundle.manifest,
                    report.peaks,
                    source_length=len(base.sources[0]),
                    padded_length=padded,
                )
            )
        self._note_memory(f"{rows} rows, beams {beam_size}")

    def _measure_without_graphs(self, base: CheckedModel) -> None:
        if self._device.kind == "cpu":
            raise NotMeasured("a CPU has no CUDA graphs")
        model = load_device_model(
            base.bundle, variant="cuda-fp16", device=self._device, use_cuda_graphs=False
        )
        for rows in self._plan.graph_rows:
            self._report.without_graphs.append(
                rate_of(
                    self._lane(base, model, rows),
                    base.sources,
                    base.limits,
                    num_slots=rows,
                    beam_size=1,
                    min_s=self._plan.min_s,
                )
            )

    def _measure_ctranslate2(self, base: CheckedModel) -> None:
        peer = CTranslate2Device(base, self._device)
        for rows in self._plan.rows:
            for beam_size in self._beam_sizes(rows):
                self._report.peers.append(
                    peer.rate(
                        base.sources,
                        target_length=base.limits[0],
                        num_sentences=rows // beam_size,
                        beam_size=beam_size,
                        min_s=self._plan.min_s,
                    )
                )

    def _measure_torch(self, base: CheckedModel) -> None:
        peer = TorchDevice(base, self._device)
        for rows in self._plan.graph_rows:
            self._report.peers.append(
                peer.rate(
                    base.sources, target_length=base.limits[0], num_sentences=rows, min_s=self._plan.min_s
                )
            )

    @staticmethod
    def _beam_sizes(rows: int) -> tuple[int, ...]:
        """Searches that fit into so many rows."""
        return (1, BEAM_SIZE) if rows >= BEAM_SIZE else (1,)

    def _load(self, checked: CheckedModel) -> DeviceModel:
        model = load_device_model(checked.bundle, variant="cuda-fp16", device=self._device)
        self._note_memory(f"{checked.name} loaded")
        return model

    def _lane(self, checked: CheckedModel, model: DeviceModel, max_rows: int) -> DrivenLane:
        return self._lane_over(checked, DeviceRunner(model, max_rows=max_rows), max_rows)

    def _lane_over(self, checked: CheckedModel, runner: DeviceRunner, max_rows: int) -> DrivenLane:
        return DrivenLane(
            checked.bundle.manifest, runner, max_rows=max_rows, max_admission_tokens=_ADMISSION_TOKENS
        )

    def _note_memory(self, what: str) -> None:
        if self._driver is not None:
            memory = self._driver.memory_info(self._device.index)
            self._report.used_bytes[what] = memory.total_bytes - memory.free_bytes


def _random_model(sizes: str, folder: Path, plan: GpuPlan) -> CheckedModel:
    return random_model(sizes, folder, num_sentences=plan.num_random)


def _device(name: str) -> tuple[Device, CudaDriver | None]:
    """The device by its name in the settings, and the driver of a GPU.

    Raises:
        DeviceUnavailable: there is no such GPU.
    """
    if name == "cpu":
        return Device(), None
    driver = probe()
    index = int(name.partition(":")[2] or 0)
    if index >= len(driver.gpus):
        raise DeviceUnavailable(f"there is no {name}: the driver shows {len(driver.gpus)} GPUs")
    if (fault := cuda_provider_fault(index)) is not None:
        raise DeviceUnavailable(f"onnxruntime {onnxruntime.__version__} cannot use {name}: {fault}")
    return Device("cuda", index), driver


def _facts(device: Device, driver: CudaDriver | None) -> GpuFacts:
    runtime = f"onnxruntime {onnxruntime.__version__}"
    if driver is None:
        return GpuFacts(str(device), "the same graphs on the CPU: no measurement", "", "", 0, runtime)
    gpu = driver.gpus[device.index]
    return GpuFacts(
        device=str(device),
        name=gpu.name,
        driver=".".join(map(str, driver.version)),
        compute_capability=".".join(map(str, gpu.compute_capability)),
        memory_bytes=gpu.total_bytes,
        onnxruntime=runtime,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", type=_device_name, help="cuda, cuda:N or cpu")
    parser.add_argument("--sizes", choices=("base", "tiny"), default="base", help="tiny tests the command")
    parser.add_argument("--models", type=Path, help="folder of the random model, used again if it is there")
    parser.add_argument(
        "--prepare", action="store_true", help="export the random model into --models, no more"
    )
    parser.add_argument("--limit-s", type=_seconds, default=270.0, help="seconds after which no part begins")
    parser.add_argument("--json", type=Path, help="write every figure here")
    arguments = parser.parse_args()
    if arguments.prepare and arguments.models is None:
        parser.error("--prepare needs --models, the folder to write to")
    return arguments


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


def _device_name(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise argparse.ArgumentTypeError(f"{name!r} is no device: cpu, cuda or cuda:N")
    return name


if __name__ == "__main__":
    sys.exit(main())
