from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.greedy import GreedyResult, greedy
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]

EOS = 0
REAL = torch.tensor([[True] * 6, [True] * 4 + [False] * 2, [True] + [False] * 5])  # [B=3, S=6]


def uncached(model: Transformer, source: list[int], max_steps: int, candidates: list[int]) -> GreedyResult:
    """One row alone, from the whole-target forward pass, token by token."""
    source_ids = torch.tensor([source])
    chosen: list[int] = []
    total = 0.0
    for _ in range(max_steps):
        # The last target token is never an input, so any id will do there.
        logits = model(
            source_ids, torch.ones_like(source_ids, dtype=torch.bool), torch.tensor([[*chosen, EOS]])
        )
        log_probs = logits[0, -1, candidates].log_softmax(dim=0).tolist()
        best = max(range(len(candidates)), key=lambda i: log_probs[i])
        total += log_probs[best]
        if candidates[best] == EOS:
            return GreedyResult(tuple(chosen), total, True)
        chosen.append(candidates[best])
    return GreedyResult(tuple(chosen), total, False)


def assert_same(actual: GreedyResult, expected: GreedyResult) -> None:
    assert actual.token_ids == expected.token_ids
    assert actual.ended == expected.ended
    assert actual.log_prob == pytest.approx(expected.log_prob, abs=1e-4)


def with_bias(model: Transformer, **bias_of: float) -> Transformer:
    with torch.no_grad():
        for token, bias in bias_of.items():
            model.output_bias[int(token.removeprefix("t"))] = bias
    return model


@pytest.mark.parametrize("decoder_cell", ["attention", "gated_attention", "ssru"])
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_batch_equals_each_row_alone_without_a_cache(
    decoder_cell: str, make_model: ModelMaker, data: st.DataObject
) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    model = make_model(decoder_cell=decoder_cell, vocabulary_size=11)
    # Often enough a row ends before its limit, and often enough it does not.
    with_bias(model, t0=data.draw(st.sampled_from([0.0, 1.0, 2.0]), label="bias of the end"))
    sources = data.draw(
        st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=5), min_size=1, max_size=3)
    )
    limits = data.draw(st.lists(st.integers(0, 6), min_size=len(sources), max_size=len(sources)))
    some_ids = st.lists(st.integers(0, 10), min_size=1, unique=True).map(sorted)
    allowed = data.draw(
        st.none() | st.lists(some_ids, min_size=len(sources), max_size=len(sources)), label="allowed"
    )

    width = max(map(len, sources))
    results = greedy(
        model,
        torch.tensor([[*source, *[0] * (width - len(source))] for source in sources]),
        torch.tensor([[i < len(source) for i in range(width)] for source in sources]),
        max_steps=torch.tensor(limits),
        allowed=None if allowed is None else [torch.tensor(row) for row in allowed],
    )
    for row, result in enumerate(results):
        candidates = list(range(11)) if allowed is None else allowed[row]
        assert_same(result, uncached(model, sources[row], limits[row], candidates))


def sources(model: Transformer) -> tuple[Tensor, Tensor]:
    return torch.randint(1, model.config.vocabulary_size, (3, 6)), REAL


def test_a_row_stops_at_the_end_token_and_counts_its_probability(make_model: ModelMaker) -> None:
    model = with_bias(make_model(), t0=100.0)
    for result in greedy(model, *sources(model), max_steps=5):
        assert result.token_ids == ()
        assert result.ended
        assert result.log_prob == pytest.approx(0.0, abs=1e-4)


def test_a_row_that_never_ends_stops_at_its_own_limit(make_model: ModelMaker) -> None:
    model = with_bias(make_model(), t0=-100.0)
    results = greedy(model, *sources(model), max_steps=torch.tensor([4, 0, 2]))
    assert [len(result.token_ids) for result in results] == [4, 0, 2]
    assert not any(result.ended for result in results)
    assert results[1].log_prob == 0.0
    same_limit = greedy(model, *sources(model), max_steps=3)
    assert [len(result.token_ids) for result in same_limit] == [3, 3, 3]


def test_only_allowed_ids_are_chosen_and_share_all_the_probability(make_model: ModelMaker) -> None:
    model = make_model()
    allowed = [torch.tensor([9]), torch.tensor([21, 4, 4]), torch.tensor([0])]
    results = greedy(model, *sources(model), max_steps=5, allowed=allowed)
    assert results[0] == GreedyResult((9,) * 5, 0.0, False)
    assert set(results[1].token_ids) <= {4, 21}
    assert len(results[1].token_ids) == 5
    assert 5 * torch.tensor(0.5).log().item() <= results[1].log_prob < 0.0  # the better of two, each time
    assert results[2] == GreedyResult((), 0.0, True)


def test_the_lowest_id_wins_a_tie(make_model: ModelMaker) -> None:
    model = make_model()
    with torch.no_grad():
        model.embedding.weight[12] = model.embedding.weight[4]
        model.output_bias[4] = model.output_bias[12] = 50.0
    assert all(result.token_ids == (4, 4) for result in greedy(model, *sources(model), max_steps=2))


def test_a_model_in_training_mode_is_refused(make_model: ModelMaker) -> None:
    model = make_model().train()
    with pytest.raises(ValueError, match="training mode"):
        greedy(model, *sources(model), max_steps=2)


def test_a_source_without_real_tokens_is_refused(make_model: ModelMaker) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="row 2 has no real source token"):
        greedy(
            model, torch.ones(3, 1, dtype=torch.long), torch.tensor([[True], [True], [False]]), max_steps=2
        )


@pytest.mark.parametrize("max_steps", [-1, torch.tensor([1, 2]), torch.tensor([1, -2, 3])])
def test_limits_that_fit_no_rows_are_refused(max_steps: int | Tensor, make_model: ModelMaker) -> None:
    model = make_model()
    with pytest.raises(ValueError, match="max_steps is"):
        greedy(model, *sources(model), max_steps=max_steps)


def test_allowed_ids_must_be_some_for_every_row(make_model: ModelMaker) -> None:
    model = make_model()
    some, none = torch.tensor([1]), torch.tensor([], dtype=torch.long)
    with pytest.raises(ValueError, match="allowed has 2 rows; it must have 3"):
        greedy(model, *sources(model), max_steps=2, allowed=[some, some])
    with pytest.raises(ValueError, match="row 1 allows 0 ids"):
        greedy(model, *sources(model), max_steps=2, allowed=[some, none, some])
