from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from model.config import TransformerConfig
from model.data.batches import BatchStream, WeightedSource, padded_batch
from model.training.objective import LabelSmoothing, smoothed_cross_entropy
from model.transformer import Transformer
from tests.model.training.conftest import reversed_pairs

ModelMaker = Callable[..., Transformer]


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
def test_the_smoothed_loss_and_its_gradient_are_pytorchs(smoothing: float) -> None:
    mine = torch.randn(13, 23, requires_grad=True)
    theirs = mine.detach().clone().requires_grad_()
    target_ids = torch.randint(0, 23, (13,))
    total, plain = smoothed_cross_entropy(mine, target_ids, smoothing=smoothing)
    expected = functional.cross_entropy(theirs, target_ids, label_smoothing=smoothing, reduction="sum")
    torch.testing.assert_close(total, expected)
    assert plain == pytest.approx(
        functional.cross_entropy(mine, target_ids, reduction="sum").item(), rel=1e-5
    )
    total.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_padding_adds_nothing_to_the_loss_of_a_batch(make_model: ModelMaker) -> None:
    model = make_model()
    pairs = [([3, 4, 5, 0], [6, 0]), ([7, 0], [8, 9, 10, 11, 0]), ([2, 0], [0])]
    alone = [LabelSmoothing(0.1)(model, padded_batch([pair]), step=1) for pair in pairs]
    together = LabelSmoothing(0.1)(model, padded_batch(pairs), step=1)
    torch.testing.assert_close(together.total, torch.stack([loss.total for loss in alone]).sum())
    assert together.num_tokens == 8
    assert together.parts["cross_entropy"] == pytest.approx(
        sum(loss.parts["cross_entropy"] for loss in alone), rel=1e-5
    )


def test_a_tiny_model_learns_one_batch_by_heart(make_config: Callable[..., TransformerConfig]) -> None:
    pairs = reversed_pairs(8, seed=3)
    stream = BatchStream([WeightedSource(pairs, 1.0)], max_tokens=1000, seed=1)
    model = Transformer(make_config(decoder_layers=1, encoder_layers=1, d_model=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 121):
        batch = stream.next_batch()
        assert batch is not None
        loss = LabelSmoothing()(model, batch, step=step)
        optimizer.zero_grad()
        (loss.total / loss.num_tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert loss.total.item() / loss.num_tokens < 0.05
