"""Measuring and fitting: what the clock said is what comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.figures.complexity import (
    FIXED_LENGTH,
    FIXED_WIDTH,
    LayerCost,
    draw_complexity,
    exponent,
    measure_costs,
    saved_bytes,
)
from model.figures.layer_types import LAYER_TYPES
from model.figures.measurement import median_times_s, one_thread
from model.figures.translation_time import (
    TimesByLength,
    draw_translation_time,
    fit_quadratic,
    measure_translation,
    translate_exactly,
)
from model.greedy import greedy
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]
LENGTHS = (4, 8, 16, 32, 64, 128)


def test_tasks_take_turns_and_the_first_run_of_each_turn_does_not_count() -> None:
    now = [0.0]
    durations: dict[str, Iterator[float]] = {
        "a": iter([90, 1, 90, 5, 90, 2]),
        "b": iter([90, 7, 90, 8, 90, 30]),
    }
    turns = []

    def task(name: str) -> Callable[[], None]:
        def run() -> None:
            turns.append(name)
            now[0] += next(durations[name])

        return run

    medians = median_times_s({name: task(name) for name in "ab"}, repeats=3, clock=lambda: now[0])
    assert turns == list("aabbaabbaabb")
    assert medians == {"a": 2, "b": 8}


def test_measuring_takes_one_thread_and_gives_the_others_back() -> None:
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@given(
    st.floats(0, 1),
    st.floats(1e-5, 1e-2),
    st.floats(0, 1e-4),
)
def test_the_fit_finds_the_parts_that_made_the_times(
    constant: float, linear: float, quadratic: float
) -> None:
    n = np.array(LENGTHS, dtype=np.float64)
    times = constant + linear * n + quadratic * n**2
    fit = fit_quadratic(LENGTHS, times.tolist())
    for length, time in zip(LENGTHS, times, strict=True):
        assert sum(fit.parts(length)) == pytest.approx(time, rel=1e-6)
    assert fit.residual < 1e-6


@given(st.lists(st.floats(1e-4, 10), min_size=6, max_size=6))
def test_no_part_of_a_fit_is_negative_whatever_was_measured(times: list[float]) -> None:
    fit = fit_quadratic(LENGTHS, times)
    assert min(fit.constant, fit.linear, fit.quadratic) >= 0
    # Zero everywhere would have a residual of 1.
    assert 0 <= fit.residual < 1


def test_a_fit_needs_three_lengths() -> None:
    with pytest.raises(ValueError, match="2 lengths"):
        fit_quadratic([1, 2, 2], [1.0, 2.0, 2.0])


@pytest.mark.parametrize("decoder_cell", ["attention", "ssru"])
def test_the_measured_translation_is_greedy_decoding_for_exactly_so_many_steps(
    decoder_cell: str, make_model: ModelMaker
) -> None:
    model = make_model(decoder_cell=decoder_cell)
    source = torch.randint(1, 23, (1, 6))
    chosen = translate_exactly(model, source, num_steps=15)[0].tolist()
    assert len(chosen) == 15
    expected = greedy(model, source, torch.ones(1, 6, dtype=torch.bool), max_steps=15)[0].token_ids
    assert chosen[: len(expected)] == list(expected)


def test_translation_and_encoder_are_measured_at_every_length(make_model: ModelMaker) -> None:
    translation, encoder = measure_translation(
        make_model(), repeats=1, translation_lengths=(1, 2, 3), encoder_lengths=(2, 4, 8)
    )
    assert translation.lengths == (1, 2, 3)
    assert encoder.lengths == (2, 4, 8)
    assert min(translation.times_s + encoder.times_s) > 0


def test_the_time_figure_states_the_fitted_parts_and_the_residual() -> None:
    exact = TimesByLength("encoder alone", LENGTHS, tuple(0.002 + 0.001 * n + 3e-6 * n**2 for n in LENGTHS))
    axis = draw_translation_time([exact]).axes[0]
    legend = axis.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["2 ms", "1 ms · n", "3 µs · n²", "measured"]
    assert axis.get_title() == "encoder alone\nresidual of the fit 0.0%"


def test_saved_bytes_counts_each_storage_once_and_no_parameter() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    x = torch.randn(5, 4, requires_grad=True)
    assert saved_bytes(lambda: x @ weight, parameters=[weight]) == 4 * 5 * 4
    assert saved_bytes(lambda: (x * x) @ weight, parameters=[weight]) == 2 * 4 * 5 * 4
    assert saved_bytes(lambda: x + x) == 0


def test_the_exponent_is_the_slope_between_the_largest_sizes() -> None:
    assert exponent([1, 10, 20], [7.0, 100.0, 400.0]) == pytest.approx(2)


def test_every_layer_is_measured_at_every_point() -> None:
    costs = measure_costs([(4, 8), (6, 8)], repeats=1)
    assert {(c.layer_type, c.length, c.width) for c in costs} == {
        (t, n, 8) for t in LAYER_TYPES for n in (4, 6)
    }
    assert all(cost.time_s > 0 and cost.memory_bytes > 0 for cost in costs)


def test_the_complexity_figure_states_the_exponents() -> None:
    costs = [
        LayerCost(layer_type, n, d, time_s=1e-6 * n**2 * d, memory_bytes=n * d)
        for layer_type in LAYER_TYPES
        for n, d in [(128, FIXED_WIDTH), (FIXED_LENGTH, FIXED_WIDTH), (FIXED_LENGTH, 512)]
    ]
    legends = [axis.get_legend() for axis in draw_complexity(costs).axes]
    texts = [legend.get_texts()[0].get_text() for legend in legends if legend is not None]
    assert texts == [f"self-attention: ∝ {power}" for power in ("n^2.0", "d^1.0", "n^1.0", "d^1.0")]
