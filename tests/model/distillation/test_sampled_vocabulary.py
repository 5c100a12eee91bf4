from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model.data.batches import Batch, padded_batch
from model.distillation.objective import Distillation, LossWeights
from model.distillation.sampled_vocabulary import SampledVocabulary
from model.training import run
from model.training.config import RunConfig
from model.transformer import Transformer

ModelMaker = Callable[..., Transformer]
V = 23


def toy_batch() -> Batch:
    return padded_batch([([3, 4, 5, 0], [6, 7, 0]), ([8, 0], [9, 10, 11, 12, 0]), ([2, 2, 0], [0])])


def shortlist(sources: object) -> np.ndarray:
    assert sources == [0, 2, 3, 4, 5, 8]  # each real source token once
    return np.arange(100, 180)


def drawn(vocabulary: SampledVocabulary, *, step: int = 1, best: list[int] | None = None) -> list[int]:
    batch = toy_batch()
    offered = vocabulary.offered(batch)
    return vocabulary.ids(
        batch, step=step, offered=offered, best=np.asarray(best or [], dtype=np.int64)
    ).tolist()


def test_it_holds_the_targets_and_a_sample_of_the_shortlist() -> None:
    batch = toy_batch()
    vocabulary = SampledVocabulary(1000, shortlist, 0, 30, 7, seed=5)
    assert vocabulary.offered(batch).tolist() == list(range(100, 180))
    ids = drawn(vocabulary, step=3)
    assert ids == sorted(set(ids))
    assert set(batch.target_ids[batch.target_mask].tolist()) <= set(ids)
    assert 30 <= sum(100 <= token < 180 for token in ids) <= 37
    assert len(ids) <= 7 + 30 + 7
    assert drawn(vocabulary, step=3) == ids
    assert drawn(vocabulary, step=4) != ids
    assert drawn(replace(vocabulary, seed=6), step=3) != ids


def test_what_is_best_is_in_whatever_the_sample() -> None:
    vocabulary = SampledVocabulary(1000, shortlist, 2, 0, 0, seed=5)
    assert drawn(vocabulary, best=[101, 6, 179]) == [0, 6, 7, 9, 10, 11, 12, 101, 179]


def test_a_short_shortlist_is_taken_whole() -> None:
    assert set(range(100, 180)) <= set(drawn(SampledVocabulary(1000, shortlist, 0, 80, 0, seed=5)))


def test_without_a_shortlist_the_candidates_are_drawn_from_all() -> None:
    ids = drawn(SampledVocabulary(100_000, None, 0, 300, 20, seed=5))
    assert 310 <= len(ids) <= 7 + 320
    assert min(ids) >= 0
    assert max(ids) < 100_000


@pytest.mark.parametrize("num_best", [1, 3])
def test_the_teacher_s_likeliest_tokens_of_every_position_compete(
    make_model: ModelMaker, num_best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher, student, batch = make_model(decoder_cell="ssru"), make_model(), toy_batch()
    offered = np.array([1, 2, 6, 13, 14, 15, 16, 17])
    vocabulary = SampledVocabulary(V, lambda _: offered, num_best, 0, 0, seed=1)
    seen: list[list[int]] = []
    choose = SampledVocabulary.ids
    monkeypatch.setattr(
        SampledVocabulary,
        "ids",
        lambda *arguments, **options: seen.append(options["best"].tolist()) or choose(*arguments, **options),
    )
    objective = Distillation(teacher, student, vocabulary, weights_of_source=[LossWeights(1.0, 0.0, 0.0)])
    loss = objective(student, batch, step=1)

    with torch.no_grad():
        logits = teacher(batch.source_ids, batch.source_mask, batch.target_ids)[batch.target_mask]
    likeliest = {int(offered[i]) for i in logits[:, offered].topk(num_best, dim=1).indices.flatten()}
    assert set(seen[0]) == likeliest
    ids = sorted(likeliest | set(batch.target_ids[batch.target_mask].tolist()))
    with torch.no_grad():
        mine = student(batch.source_ids, batch.source_mask, batch.target_ids)[batch.target_mask]
    theirs, ours = (each[:, ids].log_softmax(dim=1) for each in (logits, mine))
    divergence = float((theirs.exp() * (theirs - ours)).sum())
    assert loss.parts["divergence"] == pytest.approx(divergence, rel=1e-4)


def test_more_of_the_best_than_there_are_words_takes_all_of_them(make_model: ModelMaker) -> None:
    teacher, student = make_model(decoder_cell="ssru"), make_model()
    every, likeliest = (
        Distillation(
            teacher,
            student,
            SampledVocabulary(V, None, num_best, 0, 0 if num_best else 2000, seed=1),
            weights_of_source=[LossWeights(1.0, 1.0, 1.0)],
        )(student, toy_batch(), step=1)
        for num_best in (0, 1000)
    )
    assert likeliest.total.item() == pytest.approx(every.total.item(), rel=1e-6)


def test_what_competes_follows_from_the_configuration(make_model: ModelMaker) -> None:
    config = RunConfig.model_validate(
        {
            "source": "en",
            "target": "pt",
            "output": "run",
            "initial": "m",
            "seed": 4,
            "data": {"source": [{"name": "a", "path": "a"}]},
            "distillation": {
                "teacher": "t",
                "from_teacher": False,
                "teacher_best": 3,
                "sampled_candidates": 5,
                "sampled_others": 7,
            },
        }
    )
    teacher = SimpleNamespace(
        model=SimpleNamespace(module=lambda: make_model(decoder_cell="ssru")), candidates=shortlist
    )
    objective = run._objective(
        config,
        make_model(),
        teacher,  # type: ignore[arg-type]
        ["a"],
        SimpleNamespace(),  # type: ignore[arg-type]
        overfit=False,
    )
    assert isinstance(objective, Distillation)
    assert objective._vocabulary == SampledVocabulary(V, shortlist, 3, 5, 7, seed=4)
