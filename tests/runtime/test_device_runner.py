"""The runner of a device step by step beside simpler ones, in hostile memory; what it copies and holds."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from device_guests import CONFIGS, Decoders
from fake_device import FakeGpu, on_fake_gpu
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_runner import NaiveRunner

from app.errors import DeviceUnavailable
from app.runtime.device import Device
from app.runtime.device_buffers import DeviceBuffers, plan_buffers
from app.runtime.device_memory import LEDGER
from app.runtime.device_runner import DeviceRunner
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.runner import (
    BeamStepInput,
    BeamStepOutput,
    LogitAdjustments,
    ModelRunner,
    RowGroup,
    SearchKind,
    SourceRow,
    StepOutput,
)

CPU = Device()
MAX_ROWS = 8


@pytest.fixture(scope="module", params=list(CONFIGS))
def decoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    torch.set_num_threads(1)
    return Decoders(CONFIGS[request.param], tmp_path_factory.mktemp("device") / "tiny")


def group_of(runner: ModelRunner, kind: SearchKind, num_beams: int) -> int:
    return next(
        index
        for index, group in enumerate(runner.groups)
        if (group.kind, group.num_beams) == (kind, num_beams)
    )


class Script:
    """The same calls for several runners: tokens, parents and scores are made up, so that no runner's own
    choices lead it another way."""

    def __init__(self, decoders: Decoders, runners: Sequence[ModelRunner], kind: SearchKind, num_beams: int):
        self._choice = np.random.default_rng(17)
        self._sources, self._runners, self._kind = decoders.sources, runners, kind
        self._group = group_of(runners[0], kind, num_beams)
        self._shape = runners[0].groups[self._group]
        self._positions: list[int] = []

    def admit(self, num_newcomers: int) -> None:
        num_newcomers = min(num_newcomers, self._shape.max_rows - len(self._positions))
        chosen = self._choice.choice(len(self._sources), num_newcomers)
        rows = [
            SourceRow(len(self._positions) + index, self._sources[source], 24)
            for index, source in enumerate(chosen)
        ]
        self._positions += [0] * num_newcomers
        if rows:
            for runner in self._runners:
                runner.admit(self._group, rows)

    def leave(self, place: int) -> None:
        if not self._positions:
            return
        slot, last = place % len(self._positions), len(self._positions) - 1
        self._positions[slot] = self._positions[last]
        del self._positions[last]
        if slot != last:
            for runner in self._runners:
                runner.move(self._group, from_slot=last, to_slot=slot)

    def do(self, event: Event) -> list[StepOutput | BeamStepOutput] | None:
        if event.name == "admit":
            return self.admit(event.number)
        if event.name == "leave":
            return self.leave(event.number)
        return self.step()

    def step(self) -> list[StepOutput | BeamStepOutput] | None:
        """One step of all runners, and what each of them said."""
        if not self._positions or max(self._positions) >= 24:
            return None
        positions = np.array(self._positions)
        self._positions = [position + 1 for position in self._positions]
        if self._kind is SearchKind.GREEDY:
            last_ids = self._choice.integers(2, 96, len(positions))
            return [runner.step(self._group, last_ids, positions) for runner in self._runners]
        beams = self._beams(positions)
        return [runner.beam_step(self._group, beams) for runner in self._runners]

    def _beams(self, positions: np.ndarray) -> BeamStepInput:
        shape = len(positions), self._shape.num_beams
        parents = self._choice.integers(0, shape[1], shape)
        parents[positions == 0] = 0
        scores = -self._choice.random(shape, dtype=np.float32)
        scores[positions == 0, 1:] = -np.inf
        adjustments = None
        if self._kind is SearchKind.GUIDED:
            num_rows = int(self._choice.integers(0, shape[0] * shape[1] + 1))
            adjustments = LogitAdjustments(
                rows=np.arange(num_rows),
                token_ids=self._choice.integers(0, 96, num_rows),
                divisors=np.full(num_rows, 1.3, dtype=np.float32),
                addends=np.where(np.arange(num_rows) % 2, -1e9, 0.5).astype(np.float32),
            )
        return BeamStepInput(
            last_ids=self._choice.integers(2, 96, shape),
            positions=positions,
            scores=scores,
            parents=parents,
            num_candidates=2 * shape[1],
            adjustments=adjustments,
        )


def distance(found: StepOutput | BeamStepOutput, expected: StepOutput | BeamStepOutput) -> float:
    """How far the best values are apart on average; no further than all are, whichever token has them."""
    if isinstance(found, StepOutput):
        assert isinstance(expected, StepOutput)
        return float(np.abs(found.log_probs - expected.log_probs).mean())
    assert isinstance(expected, BeamStepOutput)
    assert (found.attention is None) == (expected.attention is None)
    scores = np.where(expected.scores < -1e8, found.scores, expected.scores)
    distance = np.abs(np.where(found.scores < -1e8, scores, found.scores) - scores).mean()
    if found.attention is not None and expected.attention is not None:
        distance = max(distance, np.abs(found.attention - expected.attention).max())
    return float(distance)


def exactly(output: StepOutput | BeamStepOutput) -> list[bytes | None]:
    return [None if array is None else array.tobytes() for array in vars(output).values()]


@dataclass(frozen=True)
class Event:
    name: str
    number: int = 0


events = st.lists(
    st.one_of(
        st.builds(Event, st.just("admit"), st.integers(1, 4)),
        st.builds(Event, st.just("leave"), st.integers(0, 7)),
        st.just(Event("step")),
    ),
    max_size=25,
)
BUSY = [
    Event(*words)
    for words in (
        *(("admit", 3), ("step",), ("step",), ("step",), ("leave", 0), ("leave", 0), ("admit", 4), ("step",)),
        *(("leave", 1), ("step",), ("leave", 2), ("admit", 2), ("step",)),
    )
]
KINDS = [(SearchKind.GREEDY, 1), (SearchKind.BEAMS, 2), (SearchKind.GUIDED, 2), (SearchKind.GUIDED, 1)]


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(KINDS), script=events)
@example(kind=KINDS[0], script=BUSY)
@example(kind=KINDS[1], script=BUSY)
@example(kind=KINDS[2], script=BUSY)
def test_every_step_is_the_references_bit_for_bit_captured_or_not(
    decoders: Decoders, kind: tuple[SearchKind, int], script: list[Event]
) -> None:
    reference = NaiveRunner(decoders.device, max_rows=MAX_ROWS)
    plain = DeviceRunner(decoders.device, max_rows=MAX_ROWS)
    captured = DeviceRunner(on_fake_gpu(decoders.device, FakeGpu()), max_rows=MAX_ROWS)
    play = Script(decoders, [reference, plain, captured], *kind)
    for event in script:
        if (outputs := play.do(event)) is not None:
            assert exactly(outputs[1]) == exactly(outputs[0])
            assert exactly(outputs[2]) == exactly(outputs[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_computes_what_the_cpus_runner_computes_in_float32(
    decoders: Decoders, kind: tuple[SearchKind, int]
) -> None:
    """Nearly: weights as strong as these make much of float16's roundings."""
    runners = OnnxRunner(decoders.fp32, max_rows=MAX_ROWS), DeviceRunner(decoders.device, max_rows=MAX_ROWS)
    play = Script(decoders, runners, *kind)
    distances = [
        distance(outputs[1], outputs[0]) for event in BUSY * 2 if (outputs := play.do(event)) is not None
    ]
    assert len(distances) == 12
    assert float(np.median(distances)) < 0.05
    assert max(distances) < 0.5


def tensors_of(buffers: DeviceBuffers) -> Iterator[tuple[str, np.ndarray]]:
    """Caches and state, as they lie in the memory of the CPU."""
    for name, tensor in {**buffers._cross, **buffers._state}.items():
        yield name, tensor.read()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_free_slots_hold_reaches_nobody_neither_those_beside_them_nor_who_takes_them(
    decoders: Decoders, kind: tuple[SearchKind, int], value: float
) -> None:
    clean = DeviceRunner(decoders.device, max_rows=MAX_ROWS)
    dirty = DeviceRunner(on_fake_gpu(decoders.device, FakeGpu()), max_rows=MAX_ROWS)
    play = Script(decoders, [clean, dirty], *kind)
    num_live = 3 if kind[1] == 1 else 1
    play.admit(num_live)
    play.step()
    buffers = dirty._buffers[play._group]
    assert buffers is not None
    for name, memory in tensors_of(buffers):
        assert memory.flags.writeable
        num_beams = 1 if name.startswith("cross") else kind[1]
        end = len(memory) if name.startswith("cross") else len(memory) - 1  # the last row of a state is zero
        memory[num_live * num_beams : end] = value
    for _ in range(2):
        first, second = play.step() or pytest.fail("no step")
        assert exactly(first) == exactly(second)
    play.admit(2)
    for _ in range(2):
        first, second = play.step() or pytest.fail("no step")
        assert exactly(first) == exactly(second)


def test_a_slot_that_nobody_has_attends_to_something(decoders: Decoders) -> None:
    """Attention to nothing divides zero by zero in some of CUDA's kernels."""
    runner = DeviceRunner(decoders.device, max_rows=4)
    play = Script(decoders, [runner], SearchKind.GREEDY, 1)
    for event in BUSY:
        play.do(event)
        if (buffers := runner._buffers[play._group]) is not None:
            assert buffers._mask.read().any(axis=1).all()


def test_the_row_that_empties_others_stays_empty(decoders: Decoders) -> None:
    runner = DeviceRunner(on_fake_gpu(decoders.device, FakeGpu()), max_rows=4)
    play = Script(decoders, [runner], SearchKind.GREEDY, 1)
    for event in BUSY:
        play.do(event)
    buffers = runner._buffers[play._group]
    assert buffers is not None
    for tensor in buffers._state.values():
        memory = tensor.read()
        assert not memory[-1].any()
        assert memory[:-1].any()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_what_was_chosen_is_read_back(
    decoders: Decoders, kind: tuple[SearchKind, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = onnxruntime.OrtValue.numpy

    def counted(value: onnxruntime.OrtValue) -> Any:
        read.append(value.tensor_size_in_bytes())
        return original(value)

    monkeypatch.setattr(onnxruntime.OrtValue, "numpy", counted)
    runner = DeviceRunner(decoders.device, max_rows=MAX_ROWS)
    play = Script(decoders, [runner], *kind)
    group = runner.groups[play._group]
    play.admit(3)
    assert read == []
    play.step()
    aligned = [-(-size // 256) * 256 for size in chosen_bytes(group)]
    assert read == [sum(aligned), *attention_bytes(group)]
    read.clear()
    play.leave(0)
    play.admit(2)
    assert read == []


def chosen_bytes(group: RowGroup) -> list[int]:
    slots = group.max_rows
    if group.kind is SearchKind.GREEDY:
        return [8 * slots, 4 * slots]
    return [8 * 32 * slots, 8 * 32 * slots, 4 * 32 * slots]


def attention_bytes(group: RowGroup) -> list[int]:
    if group.kind is not SearchKind.GUIDED:
        return []
    return [4 * group.max_rows * group.num_beams * group.source_length]


def test_slots_that_are_no_neighbours_are_encoded_apart(decoders: Decoders) -> None:
    gpu = FakeGpu()
    runner = DeviceRunner(on_fake_gpu(decoders.device, gpu), max_rows=8)
    scattered = [SourceRow(slot, decoders.sources[slot], 24) for slot in (6, 1, 0, 3)]
    runner.admit(0, scattered)
    assert [run.session for run in gpu.runs if run.session == "encoder"] == [
        "encoder"
    ] * 4  # one is the first
    runner.admit(0, [SourceRow(slot, decoders.sources[slot], 24) for slot in (2, 4, 5)])
    together = DeviceRunner(decoders.device, max_rows=8)
    together.admit(0, [SourceRow(slot, decoders.sources[slot], 24) for slot in range(7)])
    last_ids, positions = np.arange(7) + 2, np.zeros(7, dtype=np.int64)
    assert exactly(runner.step(0, last_ids, positions)) == exactly(together.step(0, last_ids, positions))


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


def test_a_capture_that_cannot_have_the_device_to_itself_is_left_out(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_fake_gpu(decoders.device, FakeGpu())
    original = model.gate.capturing
    monkeypatch.setattr(model.gate, "capturing", lambda: original(timeout_s=0.0))
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with model.gate.using():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hang)
    thread.start()
    inside.wait(30)
    runner = DeviceRunner(model, max_rows=4)
    plain = DeviceRunner(decoders.device, max_rows=4)
    play = Script(decoders, [runner, plain], SearchKind.GREEDY, 1)
    play.admit(3)
    first, second = play.step() or pytest.fail("no step")
    leave.set()
    thread.join()
    assert exactly(first) == exactly(second)
    assert runner.captured_buckets == {0: ()}


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


def held_before() -> int:
    gc.collect()  # what other tests left
    return LEDGER.held_bytes(CPU)


def test_memory_is_known_before_it_is_taken_and_given_back_with_the_runner(decoders: Decoders) -> None:
    before = held_before()
    runner = DeviceRunner(decoders.device, max_rows=4)
    assert runner.buffer_bytes == 0
    expected = 0
    for kind in KINDS[:3]:
        Script(decoders, [runner], *kind).admit(1)
        expected += plan_buffers(decoders.device, runner.groups[group_of(runner, *kind)]).num_bytes
        assert runner.buffer_bytes == expected
        assert LEDGER.held_bytes(CPU) == before + expected
    del runner  # nothing is left to a collection of garbage
    assert LEDGER.held_bytes(CPU) == before


def test_what_would_pass_the_limit_is_refused_whole_and_the_rest_goes_on(decoders: Decoders) -> None:
    before = held_before()
    sizes = DeviceRunner(decoders.device, max_rows=4)
    greedy = plan_buffers(decoders.device, sizes.groups[0]).num_bytes
    limit = before + greedy + 1000
    runner = DeviceRunner(dataclasses.replace(decoders.device, memory_limit_bytes=limit), max_rows=4)
    play = Script(decoders, [runner], SearchKind.GREEDY, 1)
    play.admit(2)
    with pytest.raises(DeviceUnavailable) as refusal:
        Script(decoders, [runner], SearchKind.BEAMS, 2).admit(1)
    for part in ("cpu", "MiB", "DRAGOMAN_MAX_ROWS", "DRAGOMAN_GPU_MEMORY_MB", "beams"):
        assert part in refusal.value.message
    assert runner.buffer_bytes == greedy
    assert LEDGER.held_bytes(CPU) == before + greedy
    assert play.step() is not None


def test_a_limit_too_low_for_greedy_search_is_found_at_once(decoders: Decoders) -> None:
    model = dataclasses.replace(decoders.device, memory_limit_bytes=1000)
    with pytest.raises(
        DeviceUnavailable, match=r"needs 1 MiB on cpu .* limit is 0 MiB; lower DRAGOMAN_MAX_ROWS"
    ):
        DeviceRunner(model, max_rows=4)


def test_a_device_without_memory_is_named_and_nothing_stays_held(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = held_before()
    runner = DeviceRunner(decoders.device, max_rows=4)
    original = onnxruntime.OrtValue.ortvalue_from_numpy
    made: list[object] = []

    def scarce(*given: Any) -> Any:
        made.append(1)
        if len(made) > 5:
            raise RuntimeError("Failed to allocate memory for requested buffer of size 4096")
        return original(*given)

    with monkeypatch.context() as scarcity:
        scarcity.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", scarce)
        with pytest.raises(DeviceUnavailable, match="which cpu does not have; lower DRAGOMAN_MAX_ROWS"):
            Script(decoders, [runner], SearchKind.GREEDY, 1).admit(1)
    gc.collect()
    assert LEDGER.held_bytes(CPU) == before
    play = Script(decoders, [runner], SearchKind.GREEDY, 1)
    play.admit(1)
    assert play.step() is not None


def test_the_runner_states_what_the_manifest_says_and_refuses_groups_without_rows(decoders: Decoders) -> None:
    runner = DeviceRunner(decoders.device, max_rows=3)
    assert runner.vocabulary_size == 96
    assert runner.groups == OnnxRunner(decoders.fp32, max_rows=3).groups
    with pytest.raises(RuntimeError, match="group 1 has no rows"):
        runner.step(1, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    with pytest.raises(RuntimeError, match="group 1 has no rows"):
        runner.move(1, from_slot=1, to_slot=0)
