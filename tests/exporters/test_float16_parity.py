"""cuda-fp16 as the CPU simulates it against the exact cpu-fp32 graphs: the same model but for roundings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from cuda_models import MODELS, cuda_bundle, sources_of
from float16_graphs import NUM_CANDIDATES, Array, StepGraphs

from app.bundle import Bundle

NUM_SEGMENTS = 6
NUM_STEPS = 12
TOLERANCE = 0.02
"""Of a log-probability. The largest difference found is 0.007; logits near 8 are multiples of 1 / 256."""


@pytest.fixture(scope="module", params=list(MODELS))
def bundle(request: pytest.FixtureRequest) -> Bundle:
    return cuda_bundle(request.param)


def both(bundle: Bundle, num_beams: int) -> tuple[StepGraphs, StepGraphs]:
    sources = sources_of(bundle, NUM_SEGMENTS)
    return StepGraphs(bundle, "cpu-fp32", sources, num_beams), StepGraphs(
        bundle, "cuda-fp16", sources, num_beams
    )


def start_ids(bundle: Bundle, num_rows: int) -> Array:
    return np.full(num_rows, bundle.manifest.tokens.start_id or 0)


def forced_steps(bundle: Bundle, num_rows: int, *, seed: int = 0) -> Iterator[tuple[int, Array, Array]]:
    """Rows that say random tokens, so that both sides see the same and the model cannot settle on one."""
    choice = np.random.default_rng(seed)
    last_ids = start_ids(bundle, num_rows)
    for position in range(NUM_STEPS):
        yield position, last_ids, np.full(num_rows, position)
        last_ids = choice.integers(2, bundle.manifest.sizes.vocabulary_size, num_rows)


def test_the_encoder_gives_the_exact_ones_keys_and_values(bundle: Bundle) -> None:
    exact, half = both(bundle, 1)
    assert exact.cross.keys() == half.cross.keys()
    for name, values in exact.cross.items():
        mask = exact.source_mask[:, None, :, None].astype(bool)
        assert half.cross[name].dtype == np.float16
        assert np.abs(np.where(mask, values - half.cross[name], 0)).max() <= 0.02


def test_greedy_steps_choose_the_exact_ones_tokens_wherever_these_are_clear(bundle: Bundle) -> None:
    exact, half = both(bundle, 1)
    judge, _ = both(bundle, 1)  # the exact beam graph tells by how much the best token is the best
    num_clear, said = 0, set[int]()
    for _, last_ids, positions in forced_steps(bundle, NUM_SEGMENTS):
        expected, found = exact.step(last_ids, positions), half.step(last_ids, positions)
        best = judge.step(last_ids, positions, scores=np.zeros(NUM_SEGMENTS))["scores"]
        is_clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE
        num_clear += is_clear.sum()
        assert (found["token_ids"] == expected["token_ids"])[is_clear].all()
        assert np.abs(found["log_probs"] - expected["log_probs"]).max() <= TOLERANCE
        said |= set(expected["token_ids"].tolist())
    assert len(said) > 3
    assert num_clear > 0.8 * NUM_SEGMENTS * NUM_STEPS


@pytest.mark.parametrize("num_beams", [1, 3])
def test_beam_steps_rank_the_exact_ones_continuations(bundle: Bundle, num_beams: int) -> None:
    exact, half = both(bundle, num_beams)
    num_rows = NUM_SEGMENTS * num_beams
    scores = np.random.default_rng(1).uniform(-3, 0, num_rows)
    for _, last_ids, positions in forced_steps(bundle, num_rows):
        expected = exact.step(last_ids, positions, scores=scores)
        found = half.step(last_ids, positions, scores=scores)
        assert found["scores"].shape == (NUM_SEGMENTS, NUM_CANDIDATES)
        assert_ranked_alike(found, expected)


def assert_ranked_alike(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """The same scores in order, and under each token and beam of both its own score."""
    allowed = expected["scores"] > -1e8
    assert np.abs(found["scores"] - expected["scores"])[allowed].max() <= TOLERANCE
    assert (found["scores"][~allowed] < -1e8).all()
    for row, ok in enumerate(allowed):
        of_found, of_expected = (
            {
                (beam, token): score
                for beam, token, score in zip(
                    side["beams"][row][ok], side["token_ids"][row][ok], side["scores"][row][ok], strict=True
                )
            }
            for side in (found, expected)
        )
        common = of_found.keys() & of_expected.keys()
        assert len(common) >= 0.8 * ok.sum()
        assert all(abs(of_found[key] - of_expected[key]) <= TOLERANCE for key in common)


def test_a_beam_that_must_not_go_on_is_continued_by_nobody(bundle: Bundle) -> None:
    _, half = both(bundle, 3)
    scores = np.tile([-1.0, -np.inf, -2.0], NUM_SEGMENTS)
    scores[3:6] = -np.inf  # a segment without any live beam
    num_rows = len(scores)
    found = half.step(start_ids(bundle, num_rows), np.zeros(num_rows), scores=scores)
    alive = np.arange(NUM_SEGMENTS) != 1
    assert np.isin(found["beams"][alive], [0, 2]).all()
    assert np.isfinite(found["scores"]).all()
    assert (found["scores"][1] < -1e8).all()
    assert (found["token_ids"] < bundle.manifest.sizes.vocabulary_size).all()


def adjustments_of(position: int) -> tuple[Array, Array, Array]:
    """None at every third step; else some tokens penalised and others forbidden, in some of the rows."""
    count = [0, 1, 9][position % 3]
    choice = np.random.default_rng(position)
    cells = choice.choice(NUM_SEGMENTS * 2 * 96, count, replace=False)
    columns = np.stack([cells // 96, cells % 96], axis=1).reshape(count, 2)
    divisors = choice.uniform(1, 2, count).astype(np.float32)
    addends = np.where(np.arange(count) % 2, -1e9, 0.0).astype(np.float32)
    return columns, divisors, addends


def test_guided_steps_adjust_and_rank_as_the_exact_ones(bundle: Bundle) -> None:
    exact, half = both(bundle, 2)
    num_rows = NUM_SEGMENTS * 2
    scores = np.random.default_rng(2).uniform(-2, 0, num_rows)
    for position, last_ids, positions in forced_steps(bundle, num_rows):
        adjustments = adjustments_of(position)
        expected, found = (
            side.step(last_ids, positions, scores=scores, adjustments=adjustments) for side in (exact, half)
        )
        assert_ranked_alike(found, expected)
        assert found["attention"].dtype == np.float32
        assert np.abs(found["attention"] - expected["attention"]).max() <= 0.01
        assert not found["attention"][np.repeat(half.source_mask[:, None] == 0, 2, axis=1)].any()


def test_neutral_guidance_and_none_at_all_give_what_the_beam_step_gives(bundle: Bundle) -> None:
    """A GPU is sent one adjustment that changes nothing, since its kernels fail on none."""
    (_, plain), (_, guided), (_, neutral) = both(bundle, 2), both(bundle, 2), both(bundle, 2)
    num_rows = NUM_SEGMENTS * 2
    none = np.zeros((0, 2), np.int64), np.zeros(0, np.float32), np.zeros(0, np.float32)
    one = np.zeros((1, 2), np.int64), np.ones(1, np.float32), np.zeros(1, np.float32)
    scores = np.linspace(-2, 0, num_rows)
    for _, last_ids, positions in forced_steps(bundle, num_rows):
        found = guided.step(last_ids, positions, scores=scores, adjustments=none)
        other = neutral.step(last_ids, positions, scores=scores, adjustments=one)
        assert all(np.array_equal(found[name], other[name]) for name in found)
        # The CPU leaves out other pairs of casts in another graph, so that the last bits differ.
        assert_ranked_alike(found, plain.step(last_ids, positions, scores=scores))


def test_a_row_that_may_say_nothing_says_nothing(bundle: Bundle) -> None:
    _, half = both(bundle, 1)
    columns = np.stack([np.zeros(96, np.int64), np.arange(96)], axis=1)
    found = half.step(
        start_ids(bundle, NUM_SEGMENTS),
        np.zeros(NUM_SEGMENTS),
        scores=np.zeros(NUM_SEGMENTS),
        adjustments=(columns, np.ones(96, np.float32), np.full(96, -1e9, np.float32)),
    )
    assert (found["scores"][0] < -1e8).all()
    assert (found["scores"][1:, 0] > -1e8).all()


def test_the_caches_are_written_in_place_and_only_where_a_row_stands(bundle: Bundle) -> None:
    _, half = both(bundle, 1)
    positions = np.arange(NUM_SEGMENTS)
    for array in half.state.values():
        array[...] = 7.0
    half.step(start_ids(bundle, NUM_SEGMENTS), positions)
    for tensor in bundle.manifest.state:
        array = half.state[tensor.name]
        if tensor.kind == "cell":
            assert array.dtype == np.float32
            assert (array != 7.0).any(axis=(1, 2)).all()
            continue
        changed = (array != 7.0).any(axis=(1, 3))  # [R,T]
        assert (changed == (np.arange(array.shape[2]) == positions[:, None])).all()


def test_a_row_says_the_same_in_a_batch_of_any_size(bundle: Bundle) -> None:
    """Promise 1 in the simulation; a GPU's kernels may add in another order for another number of rows."""
    sources = sources_of(bundle, NUM_SEGMENTS)
    together = StepGraphs(bundle, "cuda-fp16", sources, 1)
    alone = [StepGraphs(bundle, "cuda-fp16", [ids], 1) for ids in sources]
    for _, last_ids, positions in forced_steps(bundle, NUM_SEGMENTS):
        found = together.step(last_ids, positions)
        for row, single in enumerate(alone):
            expected = single.step(last_ids[row : row + 1], positions[row : row + 1])
            assert expected["token_ids"][0] == found["token_ids"][row]
            assert expected["log_probs"][0] == pytest.approx(found["log_probs"][row], abs=5e-3)


COPIES: dict[str, tuple[list[int], list[int]]] = {
    "one": ([4], [1]),
    "swap": ([0, 5], [5, 0]),
    "cycle": ([1, 2, 3], [2, 3, 1]),
    "one to many": ([2, 2, 2], [0, 1, 5]),
    "none": ([], []),
}


@pytest.mark.parametrize("name", list(COPIES))
@pytest.mark.parametrize("role", ["copy_state", "copy_cross"])
def test_copies_move_exactly_the_rows_told(bundle: Bundle, role: str, name: str) -> None:
    half = StepGraphs(bundle, "cuda-fp16", sources_of(bundle, NUM_SEGMENTS), 1)
    tensors = half.state if role == "copy_state" else half.cross
    choice = np.random.default_rng(3)
    for array in tensors.values():
        array[...] = choice.standard_normal(array.shape)
    before = {key: array.copy() for key, array in tensors.items()}
    sources, targets = COPIES[name]
    rows = {"from_rows": np.array(sources, np.int64), "to_rows": np.array(targets, np.int64).reshape(-1, 1)}
    half.run(role, {**tensors, **rows}, in_place=tuple(tensors))
    for key, array in tensors.items():
        expected = before[key].copy()
        expected[targets] = before[key][sources]
        assert np.array_equal(array, expected)


def test_one_beam_at_a_time_finds_what_greedy_steps_find(bundle: Bundle) -> None:
    (_, greedy), (_, beams) = both(bundle, 1), both(bundle, 1)
    for _, last_ids, positions in forced_steps(bundle, NUM_SEGMENTS):
        one = greedy.step(last_ids, positions)
        other = beams.step(last_ids, positions, scores=np.zeros(NUM_SEGMENTS))
        is_clear = other["scores"][:, 0] - other["scores"][:, 1] > 0.01
        assert np.array_equal(one["token_ids"][is_clear], other["token_ids"][is_clear, 0])
        assert one["log_probs"] == pytest.approx(other["scores"][:, 0], abs=5e-3)


FORBIDDEN: dict[str, Callable[[StepGraphs, Array, Array], Array]] = {
    "greedy": lambda side, ids, at: side.step(ids, at)["token_ids"],
    "beams": lambda side, ids, at: side.step(ids, at, scores=np.zeros(len(ids)))["token_ids"][:, :8],
}


@pytest.mark.parametrize("search", list(FORBIDDEN))
def test_the_unknown_piece_is_never_said_and_nothing_becomes_infinite(bundle: Bundle, search: str) -> None:
    """Its bias is -1e9, beyond float16."""
    _, half = both(bundle, 1)
    for _, last_ids, positions in forced_steps(bundle, NUM_SEGMENTS, seed=5):
        said = FORBIDDEN[search](half, last_ids, positions)
        assert bundle.manifest.tokens.unknown_id not in said
    for array in half.state.values():
        assert np.isfinite(array).all()
