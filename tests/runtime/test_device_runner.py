"""The runner of a device step by step beside simpler ones, in hostile memory; what it copies and holds."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from device_guests import CONFIGS, Decoders
from device_script import BUSY, KINDS, MAX_ROWS, Event, Script, distance, events, exactly, group_of
from fake_device import FakeGpu, on_fake_gpu
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_runner import NaiveRunner

from app.errors import DeviceUnavailable
from app.runtime.device import Device
from app.runtime.gpu.buffers import DeviceBuffers, plan_buffers
from app.runtime.gpu.memory import LEDGER
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.runner import (
    RowGroup,
    SearchKind,
    SourceRow,
)

CPU = Device()


@pytest.fixture(scope="module", params=list(CONFIGS))
def decoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    torch.set_num_threads(1)
    return Decoders(CONFIGS[request.param], tmp_path_factory.mktemp("device") / "tiny")


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
