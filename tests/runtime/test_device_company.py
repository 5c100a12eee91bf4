"""The runner of a device in a lane: whoever comes beside whom, captured or not, gets what it gets alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from device_guests import (
    CONFIGS,
    NUM_SOURCES,
    WISHES,
    Decoders,
    Visit,
    exactly,
    make_lane,
    receive,
)
from fake_device import FakeGpu, on_fake_gpu
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.errors import RequestCancelled, WorkerFailed
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.runner import SearchKind


@pytest.fixture(scope="module", params=list(CONFIGS))
def decoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoders:
    torch.set_num_threads(1)
    return Decoders(CONFIGS[request.param], tmp_path_factory.mktemp("company") / "tiny")


visits = st.lists(
    st.builds(
        Visit,
        gap=st.integers(0, 4),
        source=st.integers(0, NUM_SOURCES - 1),
        wish=st.integers(0, len(WISHES) - 1),
        patience=st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=10,
)
FULL = [Visit(0, index % NUM_SOURCES, index % len(WISHES)) for index in range(14)]
GREEDY = [Visit(index % 2, index % NUM_SOURCES, index % 2) for index in range(12)]
GIVING_UP = [Visit(index % 2, index % NUM_SOURCES, 2, 4 if index % 3 else None) for index in range(10)]


def check_all(decoders: Decoders, runner: DeviceRunner, arrivals: list[Visit]) -> None:
    guests = receive(decoders, make_lane(runner), arrivals)
    for guest in guests:
        (outcome,) = guest.outcomes
        if isinstance(outcome.result, RequestCancelled):
            assert guest.entry.cancelled
            continue
        expected = decoders.alone(guest.visit.source, guest.visit.wish)
        assert exactly(guest.answer()) == exactly(expected)


@settings(max_examples=6, deadline=None)
@given(max_rows=st.integers(1, 9), captures=st.booleans(), arrivals=visits)
@example(max_rows=9, captures=True, arrivals=FULL)
@example(max_rows=5, captures=False, arrivals=FULL)
@example(max_rows=6, captures=True, arrivals=GREEDY)
@example(max_rows=8, captures=True, arrivals=GIVING_UP)
def test_everyone_gets_bit_for_bit_what_they_get_alone(
    decoders: Decoders, max_rows: int, captures: bool, arrivals: list[Visit]
) -> None:
    model = on_fake_gpu(decoders.device, FakeGpu(), captures=captures)
    check_all(decoders, DeviceRunner(model, max_rows=max_rows), arrivals)


def test_the_answers_are_worth_confusing(decoders: Decoders) -> None:
    """Were all answers alike, a mix-up would not show."""
    for wish in range(len(WISHES)):
        answers = {decoders.alone(source, wish)[0].token_ids for source in range(NUM_SOURCES)}
        assert len(answers) > NUM_SOURCES // 2


def test_steps_run_as_captured_graphs_of_few_sizes_and_captures_happen_on_empty_groups(
    decoders: Decoders,
) -> None:
    gpu = FakeGpu()
    runner = DeviceRunner(on_fake_gpu(decoders.device, gpu), max_rows=6)
    receive(decoders, make_lane(runner), GREEDY)
    steps = [run for run in gpu.runs if run.session == "step"]
    # A rehearsal, which nobody's rows take part in, comes before the captures.
    assert (
        [(run.num_rows, run.graph_id) for run in steps if run.graph_id < 0]
        == [(6, -1)]
        == [(steps[0].num_rows, steps[0].graph_id)]
    )
    assert [run.num_rows for run in steps if run.captures] == [6, 4, 2, 1]
    assert all(run.captures for run in steps[1:5])
    assert all(run.awaited for run in steps)
    assert {run.num_rows for run in steps[5:]} <= {1, 2, 4, 6}
    assert len(steps) > 8
    assert runner.captured_buckets == {0: (1, 2, 4, 6)}
    others = [run for run in gpu.runs if run.session != "step"]
    assert {run.graph_id for run in others} == {-1}
    # The first run of a thread is awaited, what follows is ordered by the stream.
    assert [run.awaited for run in others] == [True] + [False] * (len(others) - 1)


def test_guided_steps_and_sessions_without_graphs_run_with_the_exact_number_of_rows(
    decoders: Decoders,
) -> None:
    gpu = FakeGpu()
    runner = DeviceRunner(on_fake_gpu(decoders.device, gpu), max_rows=6)
    receive(decoders, make_lane(runner), [Visit(0, index, 5) for index in range(3)])
    guided = [run for run in gpu.runs if run.session == "guided_step"]
    assert {run.graph_id for run in guided} == {-1}
    assert guided[0].num_rows == 6  # three segments of two beams
    plain = FakeGpu()
    runner = DeviceRunner(on_fake_gpu(decoders.device, plain, captures=False), max_rows=6)
    receive(decoders, make_lane(runner), [Visit(0, index, 0) for index in range(3)])
    steps = [run for run in plain.runs if run.session == "step"]
    assert steps[0].num_rows == 3
    assert {run.graph_id for run in steps} == {-1}
    assert runner.captured_buckets == {0: ()}


def test_no_two_runners_of_a_model_share_a_captured_graph(decoders: Decoders) -> None:
    gpu = FakeGpu()
    model = on_fake_gpu(decoders.device, gpu)
    lanes = [make_lane(DeviceRunner(model, max_rows=max_rows)) for max_rows in (2, 4)]
    guests = [decoders.guest(Visit(0, source, 0)) for source in range(4)]
    for index, guest in enumerate(guests):
        lanes[index % 2].add(guest.entry)
    while any(lane.has_work for lane in lanes):
        for lane in lanes:
            lane.tick()
    for guest in guests:
        assert exactly(guest.answer()) == exactly(decoders.alone(guest.visit.source, 0))


@pytest.mark.parametrize(
    "session", ["encoder", "step", "beam_step", "guided_step", "copy_state", "copy_cross"]
)
def test_a_call_that_fails_costs_those_it_held_and_nobody_after_them(
    decoders: Decoders, session: str
) -> None:
    gpu = FakeGpu()
    lane = make_lane(DeviceRunner(on_fake_gpu(decoders.device, gpu), max_rows=6))
    guests = [decoders.guest(visit) for visit in FULL]
    for guest in guests:
        lane.add(guest.entry)
    for _ in range(20):
        lane.tick()
    gpu.failing[session] = RuntimeError("CUDA error 700: an illegal memory access was encountered")
    latecomers = [decoders.guest(visit) for visit in FULL]
    for guest in latecomers:
        lane.add(guest.entry)
    while lane.has_work:
        lane.tick()
    assert not gpu.failing, "the call that was to fail never came"
    results = [guest.outcomes[0].result for guest in (*guests, *latecomers)]
    failed = [result for result in results if isinstance(result, WorkerFailed)]
    assert 0 < len(failed) < len(results)
    for guest in (*guests, *latecomers):
        if not isinstance(guest.outcomes[0].result, WorkerFailed):
            expected = decoders.alone(guest.visit.source, guest.visit.wish)
            assert exactly(guest.answer()) == exactly(expected)


def test_a_step_that_fails_before_it_is_captured_fails_the_newcomers_and_is_captured_later(
    decoders: Decoders,
) -> None:
    gpu = FakeGpu()
    runner = DeviceRunner(on_fake_gpu(decoders.device, gpu), max_rows=4)
    lane = make_lane(runner)
    gpu.failing["step"] = RuntimeError("CUDA error 901: operation failed due to a previous error")
    (unlucky,) = receive(decoders, lane, [Visit(0, 1, 0)])
    assert isinstance(unlucky.outcomes[0].result, WorkerFailed)
    assert runner.buffer_bytes == 0
    (lucky,) = receive(decoders, lane, [Visit(0, 1, 0)])
    assert exactly(lucky.answer()) == exactly(decoders.alone(1, 0))
    assert runner.captured_buckets == {0: (1, 2, 4)}


def test_most_answers_are_those_of_float32(decoders: Decoders) -> None:
    """Of a random model, whose choices are close ones and whose strong weights make much of roundings."""
    num_same = 0
    for wish in range(len(WISHES)):
        lane = make_lane(OnnxRunner(decoders.fp32, max_rows=4))
        guests = receive(decoders, lane, [Visit(0, source, wish) for source in range(NUM_SOURCES)])
        for guest in guests:
            found, expected = decoders.alone(guest.visit.source, wish)[0], guest.answer()[0]
            if found.token_ids == expected.token_ids:
                num_same += 1
                assert found.score == pytest.approx(expected.score, abs=0.1)
                assert (found.attention is None) == (expected.attention is None)
                if found.attention is not None and expected.attention is not None:
                    assert np.abs(found.attention - expected.attention).max() < 0.1
    assert num_same > 0.8 * len(WISHES) * NUM_SOURCES


def test_a_model_without_beams_serves_the_rest(decoders: Decoders) -> None:
    model = dataclasses.replace(decoders.device, beam_step=None, guided_step=None)
    runner = DeviceRunner(model, max_rows=2)
    assert {group.kind for group in runner.groups} == {SearchKind.GREEDY}
    check_all(decoders, runner, [Visit(0, source, 0) for source in range(4)])
