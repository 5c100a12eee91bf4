from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from app.errors import InvalidOption
from model.data.batches import padded_batch
from model.distillation.initialisation import student_of
from model.distillation.objective import Distillation, LossWeights
from model.distillation.sampled_vocabulary import SampledVocabulary
from model.training.config import TrainingSection
from model.training.device import device_of, uses_bfloat16
from model.training.objective import LabelSmoothing, Objective, autocast_of
from model.transformer import Transformer

CPU = torch.device("cpu")
PAIRS = [([3, 4, 5, 0], [6, 7, 0]), ([8, 0], [9, 10, 11, 12, 0])]


def test_cuda_is_taken_where_it_is_and_refused_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(TrainingSection()).type == "cuda"
    assert device_of(TrainingSection(device="cpu")) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(TrainingSection()) == CPU
    with pytest.raises(InvalidOption, match="device is cuda and PyTorch sees none"):
        device_of(TrainingSection(device="cuda"))


@pytest.mark.parametrize(
    ("capabilities", "has_it"),
    [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx512_f": True}, False)],
)
def test_bfloat16_is_for_processors_that_multiply_in_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, bool], has_it: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert uses_bfloat16("auto", CPU) is has_it
    assert not uses_bfloat16("float32", CPU)
    if has_it:
        assert uses_bfloat16("bfloat16", CPU)
    else:
        with pytest.raises(InvalidOption, match="does not multiply in it"):
            uses_bfloat16("bfloat16", CPU)


@pytest.mark.parametrize("objective_name", ["smoothing", "distillation"])
def test_in_bfloat16_losses_and_gradients_are_about_those_of_float32(
    make_model: Callable[..., Transformer], objective_name: str
) -> None:
    teacher = make_model(decoder_cell="ssru")
    model = student_of(teacher)
    objective: Objective = LabelSmoothing(0.1)
    if objective_name == "distillation":
        vocabulary = SampledVocabulary(23, None, 2, 0, 500, seed=1)
        objective = Distillation(teacher, model, vocabulary, weights_of_source=[LossWeights(1.0, 1.0, 1.0)])
    totals, gradients = [], []
    for bfloat16 in (False, True):
        with autocast_of(CPU, bfloat16=bfloat16):
            loss = objective(model, padded_batch(PAIRS), step=1)
        assert loss.total.dtype == torch.float32
        model.zero_grad()
        loss.total.backward()  # type: ignore[no-untyped-call]
        totals.append(loss.total.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert totals[0] != totals[1]
    assert totals[0] == pytest.approx(totals[1], rel=0.03)
    assert torch.cosine_similarity(*gradients, dim=0) > 0.98
