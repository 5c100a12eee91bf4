"""The GPU check on the CPU: its own code, on graphs that a CPU simulates."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from app.bundle import Bundle
from app.runtime.device import Device
from app.runtime.onnx_model import load_model
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.runner import StepOutput
from app.text import Tokenizer
from benchmarks import gpu_check
from benchmarks.driven_lane import DrivenLane
from benchmarks.gpu_peaks import Peaks, measure_peaks
from benchmarks.gpu_plan import FULL, GpuFacts, GpuReport
from benchmarks.gpu_report import gpu_table
from benchmarks.gpu_speed import Rate, shares_of
from benchmarks.gpu_tokens import SentenceAgreement, StepAgreement, compare_alone, compare_steps
from benchmarks.machine import this_machine
from exporters.export import export_bundle
from tests.tiny_models import tiny_checkpoint, tiny_options, tiny_texts


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("gpu-check") / "tiny"
    return export_bundle(tiny_checkpoint(), folder, tiny_options())


@pytest.fixture(scope="module")
def sources(bundle: Bundle) -> list[list[int]]:
    manifest = bundle.manifest
    tokenizer = Tokenizer.open(bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)
    return tokenizer.encode_sources(list(tiny_texts()))


class _Wrong(OnnxRunner):
    """A runner whose second slot is wrong from the third step on."""

    token_shift = 0
    log_prob_shift = 0.0

    def step(self, group, last_ids, positions):
        output = super().step(group, last_ids, positions)
        tokens, log_probs = output.token_ids.copy(), output.log_probs.copy()
        if positions[0] >= 2 and len(tokens) > 1:
            tokens[1] = (tokens[1] + self.token_shift) % self.vocabulary_size
            log_probs[1] += self.log_prob_shift
        return StepOutput(tokens, log_probs)


def _compare(bundle, sources, runner_class, **wrong) -> StepAgreement:
    model = load_model(bundle, variant="cpu-fp32", use_shortlist=False)
    runner = runner_class(model, max_rows=4)
    for name, value in wrong.items():
        setattr(runner, name, value)
    return compare_steps(
        OnnxRunner(model, max_rows=4),
        runner,
        sources,
        [20] * len(sources),
        eos_id=bundle.manifest.tokens.eos_id,
        max_rows=4,
    )


def test_a_runner_agrees_with_itself_at_every_step(bundle, sources):
    agreement = _compare(bundle, sources, OnnxRunner)

    assert agreement.num_steps > len(sources)
    assert agreement.num_equal == agreement.num_steps
    assert agreement.max_difference == 0.0
    assert agreement.passed


def test_wrong_tokens_are_counted_and_do_not_lead_the_reference_astray(bundle, sources):
    agreement = _compare(bundle, sources, _Wrong, token_shift=1)

    assert agreement.num_steps == _compare(bundle, sources, OnnxRunner).num_steps
    assert 0 < agreement.num_steps - agreement.num_equal < agreement.num_steps
    assert agreement.max_difference == 0.0


@pytest.mark.parametrize("shift", [0.2, float("nan")])
def test_wrong_log_probabilities_do_not_pass(bundle, sources, shift):
    assert not _compare(bundle, sources, _Wrong, log_prob_shift=shift).passed


def test_a_cpu_gives_the_same_alone_and_in_company(bundle, sources):
    model = load_model(bundle, variant="cpu-fp32", use_shortlist=False)
    lane = DrivenLane(bundle.manifest, OnnxRunner(model, max_rows=4), max_rows=4, max_admission_tokens=1024)

    agreement = compare_alone(lane, sources, [20] * len(sources), seed=1)

    assert agreement == SentenceAgreement(len(sources), len(sources), agreement.max_score_difference)
    assert agreement.max_score_difference < 1e-6
    assert agreement.passed


def test_peaks_are_measured():
    peaks = measure_peaks(Device(), matrix_size=64, vector_size=4096)

    assert 0 < peaks.flop_per_s < 1e15
    assert 0 < peaks.bytes_per_s < 1e15


def test_shares_follow_the_time_a_step_takes(bundle):
    peaks = Peaks(flop_per_s=1e12, bytes_per_s=1e11, matrix_size=1, vector_bytes=1)
    rate = Rate(num_sentences=4, beam_size=1, num_waves=2, num_tokens=80, wall_s=1.0)
    slower = dataclasses.replace(rate, wall_s=2.0)

    fast, slow = (
        shares_of(one, bundle.manifest, peaks, source_length=8, padded_length=64) for one in (rate, slower)
    )

    assert fast.bandwidth == pytest.approx(2 * slow.bandwidth)
    assert fast.compute == pytest.approx(2 * slow.compute)
    sizes = bundle.manifest.sizes
    projection = sizes.d_model * sizes.vocabulary_size
    # 20 steps of 2 waves read at least the projection's weights, in two bytes each.
    assert fast.bandwidth > projection * 2 * 20 * 2 / 1e11


def test_the_report_names_what_is_missing_and_what_is_wrong():
    facts = GpuFacts("cuda:0", "a GPU", "13.0", "9.0", 1 << 30, "onnxruntime 1")
    report = GpuReport(this_machine(), facts, "base", FULL)
    report.steps["good"] = StepAgreement(100, 100, 0.01)
    assert report.wrong == []

    report.steps["bad"] = StepAgreement(100, 50, 0.01)
    report.alone["bad"] = SentenceAgreement(100, 100, 0.5)
    report.missing["PyTorch"] = "PyTorch is not installed"
    report.failed["peaks"] = "RuntimeError: out of memory"

    assert report.wrong == ["steps of bad", "alone and in company: bad", "peaks"]
    table = gpu_table(report)
    assert "PyTorch is not installed" in table
    assert "DOES NOT HOLD" in table
    assert "out of memory" in table


def test_nothing_compared_is_not_right():
    facts = GpuFacts("cuda:0", "a GPU", "13.0", "9.0", 1 << 30, "onnxruntime 1")
    assert GpuReport(this_machine(), facts, "base", FULL).wrong == ["no tokens were compared"]


def test_the_whole_command_runs_on_a_cpu(monkeypatch, tmp_path, capsys):
    file = tmp_path / "gpu.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "gpu_check",
            "--device",
            "cpu",
            "--sizes",
            "tiny",
            "--models",
            str(tmp_path / "models"),
            "--json",
            str(file),
        ],
    )

    assert gpu_check.main() == 0, capsys.readouterr().out

    found = json.loads(file.read_text())
    assert found["failed"] == {}
    assert {rate["beam_size"] for rate in found["rates"]} == {1, 4}
    assert found["steps"]["tiny"]["num_steps"] == 3 * 25
    assert np.isfinite(found["latency"]["p50_ms"])
    assert "no measurement" in capsys.readouterr().out


def test_a_missing_gpu_is_said_and_ends_with_1(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cuda:0"])

    assert gpu_check.main() == 1
    assert "libcuda" in capsys.readouterr().err


def test_a_model_prepared_elsewhere_needs_no_exporter(monkeypatch, tmp_path):
    folder = Path(tmp_path / "models")
    arguments = ["gpu_check", "--prepare", "--sizes", "tiny", "--models", str(folder)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert gpu_check.main() == 0
    monkeypatch.setitem(sys.modules, "exporters.export", None)
    monkeypatch.setitem(sys.modules, "torch", None)

    monkeypatch.setattr(
        sys, "argv", ["gpu_check", "--device", "cpu", "--sizes", "tiny", "--models", str(folder)]
    )
    assert gpu_check.main() == 0


def test_a_folder_of_somebody_else_is_left_alone(monkeypatch, tmp_path, capsys):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "data.txt").write_text("mine")
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--prepare", "--sizes", "tiny", "--models", str(tmp_path)])

    assert gpu_check.main() == 1
    assert "is no model that this command made" in capsys.readouterr().err
    assert (tmp_path / "tiny" / "data.txt").read_text() == "mine"


def test_a_path_that_cannot_be_written_is_found_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_check, "_Check", None)
    monkeypatch.setattr(
        sys, "argv", ["gpu_check", "--device", "cpu", "--json", str(tmp_path / "no" / "such.json")]
    )

    assert gpu_check.main() == 1
    assert "such.json" in capsys.readouterr().err


def test_tokens_that_nobody_had_time_to_compare_are_not_right(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--sizes", "tiny", "--limit-s", "1e-9"])

    assert gpu_check.main() == 1
    assert "the time was over" in capsys.readouterr().out


def test_a_machine_with_the_extra_gpu_alone_can_run_a_model_that_was_prepared(tmp_path):
    folder = tmp_path / "models"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--sizes", "tiny", "--models", str(folder)]
    root = Path(__file__).resolve().parents[2]
    subprocess.run([*command, "--prepare"], cwd=root, check=True, capture_output=True)
    absent = "psutil", "torch", "onnx", "ctranslate2", "httpx", "sacrebleu", "rich.console"
    code = (
        "import sys, runpy; "
        f"sys.modules.update(dict.fromkeys({absent!r})); "
        f"sys.argv = ['gpu_check', '--device', 'cpu', '--sizes', 'tiny', '--models', {str(folder)!r}]; "
        "runpy.run_module('benchmarks.gpu_check', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "every check of tokens holds" in done.stdout
