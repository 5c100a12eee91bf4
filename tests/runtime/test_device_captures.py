"""When a runner captures its steps, what it does without, and who may use the device meanwhile."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_guests import CONFIGS, Decoders
from device_script import KINDS, Script, exactly, group_of
from fake_device import FakeGpu, on_fake_gpu

from app.runtime.gpu.graphs import CaptureGate, Succession, Superseded
from app.runtime.gpu.memory import PackedTensors
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.runner import SearchKind, SourceRow

PATIENCE_S = 30.0


@pytest.fixture(scope="module", params=list(CONFIGS))
def decoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    torch.set_num_threads(1)
    return Decoders(CONFIGS[request.param], tmp_path_factory.mktemp("captures") / "tiny")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Occupied:
    """A thread that is inside a gate, as while a model is loaded or a call hangs."""

    def __init__(self, gate: CaptureGate) -> None:
        self._inside, self._leave = threading.Event(), threading.Event()

        def occupy() -> None:
            with gate.using():
                self._inside.set()
                assert self._leave.wait(PATIENCE_S)

        self._thread = threading.Thread(target=occupy)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._inside.wait(PATIENCE_S)

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(PATIENCE_S)


def same_outputs(play: Script) -> bool:
    """Whether both runners say the same of a step."""
    first, second = play.step() or pytest.fail("no step")
    return exactly(first) == exactly(second)


def refuse_capture() -> None:
    raise RuntimeError("CUDA error 900: operation not permitted when stream is capturing")


def test_another_thread_runs_uncaptured(decoders: Decoders) -> None:
    """Its first run under a captured name would go three steps at once."""
    gpu = FakeGpu()
    captured = DeviceRunner(on_fake_gpu(decoders.device, gpu), max_rows=4)
    plain = DeviceRunner(decoders.device, max_rows=4)
    play = Script(decoders, [captured, plain], SearchKind.GREEDY, 1)
    play.admit(3)
    play.step()
    gpu.runs.clear()
    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.extend(play.step() or []))
    thread.start()
    thread.join()
    assert exactly(outputs[0]) == exactly(outputs[1])
    assert [(run.graph_id, run.num_rows) for run in gpu.runs if run.session == "step"] == [(-1, 3)]
    play.step()
    assert gpu.runs[-1].graph_id > 0


def test_what_others_keep_from_being_captured_runs_uncaptured_until_the_group_is_empty_and_it_is_time(
    decoders: Decoders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    model = on_fake_gpu(decoders.device, FakeGpu(), gate=CaptureGate(max_wait_s=0.0))
    runner = DeviceRunner(model, max_rows=4, clock=clock)
    play = Script(decoders, [runner, DeviceRunner(decoders.device, max_rows=4)], SearchKind.GREEDY, 1)
    with Occupied(model.gate):
        play.admit(2)
        assert same_outputs(play)
        assert runner.captured_buckets == {0: ()}
    clock.now_s += 1000
    play.admit(1)  # two have slots, whose state must not go several steps at once
    assert same_outputs(play)
    assert runner.captured_buckets == {0: ()}
    for _ in range(3):
        play.leave(0)
    play.admit(2)
    assert runner.captured_buckets == {0: (1, 2, 4)}
    assert same_outputs(play)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert all("bundle tiny (greedy search" in record.getMessage() for record in caplog.records)


def test_a_group_is_not_tried_again_at_once(decoders: Decoders) -> None:
    clock = Clock()
    model = on_fake_gpu(decoders.device, FakeGpu(), gate=CaptureGate(max_wait_s=0.0))
    runner = DeviceRunner(model, max_rows=4, clock=clock)
    play = Script(decoders, [runner], SearchKind.GREEDY, 1)
    with Occupied(model.gate):
        play.admit(1)
    play.leave(0)
    play.admit(1)
    assert runner.captured_buckets == {0: ()}
    play.leave(0)
    clock.now_s += 2
    play.admit(1)
    assert runner.captured_buckets == {0: (1, 2, 4)}


def test_a_capture_that_raises_costs_nobody_an_answer_and_its_group_alone_the_graphs(
    decoders: Decoders, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, clock = FakeGpu(), Clock()
    gpu.during_capture = refuse_capture
    runner = DeviceRunner(on_fake_gpu(decoders.device, gpu), max_rows=4, clock=clock)
    runners = [runner, DeviceRunner(decoders.device, max_rows=4)]
    greedy, beams = (Script(decoders, runners, *kind) for kind in KINDS[:2])
    for _ in range(3):
        greedy.admit(2)
        assert same_outputs(greedy)
        greedy.leave(0)
        greedy.leave(0)
        clock.now_s += 10_000
    assert runner.captured_buckets == {0: ()}
    [record] = caplog.records
    assert "CUDA error 900: operation not permitted" in record.getMessage()
    assert "DRAGOMAN_CUDA_GRAPHS=false" in record.getMessage()
    assert len([run for run in gpu.runs if run.captures]) == 1
    gpu.during_capture = lambda: None
    beams.admit(2)
    assert same_outputs(beams)
    assert runner.captured_buckets == {0: (), group_of(runner, *KINDS[1]): (1, 2)}


def test_after_a_capture_that_breaks_more_than_itself_a_runner_captures_nothing(decoders: Decoders) -> None:
    gpu = FakeGpu()

    def break_session() -> None:
        gpu.failing["step"] = RuntimeError("CUDA error 906: operation would make the legacy stream depend")
        refuse_capture()

    gpu.during_capture = break_session
    runner = DeviceRunner(on_fake_gpu(decoders.device, gpu), max_rows=4)
    runners = [runner, DeviceRunner(decoders.device, max_rows=4)]
    newcomer = SourceRow(0, decoders.sources[0], 24)
    with pytest.raises(RuntimeError, match="CUDA error 906"):
        runner.admit(0, [newcomer])
    for kind in KINDS[:2]:
        play = Script(decoders, runners, *kind)
        play.admit(2)
        assert same_outputs(play)
    assert set(runner.captured_buckets.values()) == {()}


def test_few_rows_are_not_rounded_up_to_the_one_bucket_that_was_captured(decoders: Decoders) -> None:
    gpu = FakeGpu()
    model = on_fake_gpu(decoders.device, gpu, gate=CaptureGate(max_wait_s=0.0))
    held: list[Occupied] = []

    class Once(CaptureGate):
        """Others come after the first capture."""

        @contextmanager
        def capturing(self) -> Iterator[bool]:
            with super().capturing() as granted:
                yield granted
            if not held:
                held.append(Occupied(self))
                held[0].__enter__()

    runner = DeviceRunner(dataclasses.replace(model, gate=Once(max_wait_s=0.0)), max_rows=4)
    play = Script(decoders, [runner], SearchKind.GREEDY, 1)
    play.admit(1)
    held[0].__exit__()
    assert runner.captured_buckets == {0: (4,)}
    play.step()
    assert (gpu.runs[-1].num_rows, gpu.runs[-1].graph_id) == (1, -1)
    play.admit(2)
    play.step()
    assert gpu.runs[-1].num_rows == 4
    assert gpu.runs[-1].graph_id > 0


def test_a_runner_that_has_a_successor_touches_the_device_no_more(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu()
    model = on_fake_gpu(decoders.device, gpu, succession=Succession())
    old = DeviceRunner(model, max_rows=4)
    play = Script(decoders, [old], SearchKind.GREEDY, 1)
    play.admit(2)
    new = DeviceRunner(model, max_rows=4)
    num_runs = len(gpu.runs)
    with monkeypatch.context() as untouched:
        untouched.setattr(PackedTensors, "upload", lambda _self: pytest.fail("a copy to the device"))
        for call in (lambda: play.admit(1), play.step):
            with pytest.raises(Superseded):
                call()
    assert len(gpu.runs) == num_runs
    fresh = Script(decoders, [new, DeviceRunner(decoders.device, max_rows=4)], SearchKind.GREEDY, 1)
    fresh.admit(2)
    assert same_outputs(fresh)


@pytest.mark.parametrize("session", ["step", "encoder"])
def test_a_runner_that_is_succeeded_inside_a_call_leaves_the_rest_of_it_undone(
    decoders: Decoders, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in its first capture, or in the first of two encoder passes."""
    gpu = FakeGpu()
    model = on_fake_gpu(decoders.device, gpu, succession=Succession(), captures=session == "step")
    old = DeviceRunner(model, max_rows=4)
    run = gpu.run
    successors: list[tuple[DeviceRunner, int]] = []

    def hang(*given: Any, **named: Any) -> None:
        run(*given, **named)
        last = gpu.runs[-1]
        if not successors and last.session == session and (last.captures or not last.awaited):
            successors.append((DeviceRunner(model, max_rows=4), len(gpu.runs)))

    monkeypatch.setattr(gpu, "run", hang)
    with pytest.raises(Superseded):
        old.admit(0, [SourceRow(slot, decoders.sources[slot], 24) for slot in (0, 2)])
    [(_, num_runs)] = successors
    assert len(gpu.runs) == num_runs


def test_nobody_uses_the_device_during_a_capture(decoders: Decoders) -> None:
    """A second runner of the same device, in a thread of its own, arrives in the middle of one."""
    gpu = FakeGpu()
    model = on_fake_gpu(decoders.device, gpu)
    other = DeviceRunner(model, max_rows=2)
    play = Script(decoders, [other], SearchKind.GREEDY, 1)
    play.admit(2)
    outputs: list[object] = []
    threads: list[threading.Thread] = []
    waiting_at: list[bool] = []

    def intrude() -> None:
        if not threads:
            threads.append(threading.Thread(target=lambda: outputs.append(play.step())))
            threads[0].start()
            threads[0].join(0.05)
            waiting_at.append(threads[0].is_alive())

    gpu.during_capture = intrude
    capturing = DeviceRunner(model, max_rows=4)  # lives on: its encoder may still be waiting in the stream
    Script(decoders, [capturing], SearchKind.GREEDY, 1).admit(1)
    threads[0].join(30)
    assert waiting_at == [True]
    assert len(outputs) == 1
