"""The onnxruntime runner over a tiny real model: buffers, candidates, sessions shared by threads."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_checkpoint, tiny_options, tiny_shortlist, tiny_texts

from app.bundle import Bundle, Variant, open_bundle
from app.decoding.greedy import GreedySearch
from app.decoding.hypothesis import Hypothesis
from app.errors import WorkerFailed
from app.runtime.engine import Engine, EngineOptions
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.onnx_runner import OnnxRunner, row_groups
from app.runtime.request import TranslationRequest
from app.runtime.runner import SourceRow
from exporters.export import export_bundle


@pytest.fixture(scope="module", params=["attention", "gated_attention", "ssru"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("runner") / "tiny"
    export_bundle(tiny_checkpoint(shortlist=True, decoder_cell=request.param), path, tiny_options())
    return open_bundle(path)


@given(max_source_tokens=st.integers(1, 1000), max_rows=st.integers(1, 64))
def test_row_groups_rise_to_the_models_limit(max_source_tokens: int, max_rows: int) -> None:
    groups = row_groups(max_source_tokens, max_rows)
    lengths = [group.source_length for group in groups]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == max_source_tokens
    assert all(2 * a >= b for a, b in itertools.pairwise(lengths))
    assert {group.max_rows for group in groups} == {max_rows}


def make_entry(ids: Sequence[int], outcomes: list[Outcome]) -> Entry:
    return Entry(
        ids,
        GreedySearch(eos_id=0, max_target_tokens=10),
        max_target_tokens=10,
        submitted_at_s=0.0,
        deliver=outcomes.append,
        candidates=tiny_shortlist().candidates(ids),
    )


def make_lane(model: OnnxModel) -> Lane:
    return Lane("tiny", OnnxRunner(model, max_rows=4), max_admission_tokens=200, observer=SilentObserver())


def translate(lane: Lane, ids: Sequence[int]) -> Hypothesis:
    outcomes: list[Outcome] = []
    lane.add(make_entry(ids, outcomes))
    while lane.has_work:
        lane.tick()
    (outcome,) = outcomes
    assert isinstance(outcome.result, tuple)
    return outcome.result[0]


class FailingSession:
    """A session whose next run fails when told so."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        self._session.run_with_iobinding(binding)


SOURCES = [[40, 41, 0], [50, 51, 52, 0], [60, 61, 0], [70, 71, 72, 73, 0]]


@pytest.mark.parametrize("variant", ["cpu-int8", "cpu-fp32"])
def test_a_failed_gathering_of_candidates_leaves_older_and_later_rows_right(
    bundle: Bundle, variant: Variant
) -> None:
    model = load_model(bundle, variant=variant, use_shortlist=True)
    alone = [translate(make_lane(model), ids) for ids in SOURCES]
    session = FailingSession(model.candidates)
    lane = make_lane(dataclasses.replace(model, candidates=session))  # type: ignore[arg-type]
    outcomes: list[list[Outcome]] = [[] for _ in range(5)]
    lane.add(make_entry(SOURCES[0], outcomes[0]))
    lane.tick()
    session.fails = True
    lane.add(make_entry(SOURCES[1], outcomes[1]))  # brings candidates that row 0 lacks
    lane.tick()
    assert not session.fails
    assert isinstance(outcomes[1][0].result, WorkerFailed)
    # The same words again: a half-made union would be taken for a whole one.
    for index, source in ((2, 1), (3, 2), (4, 3)):
        lane.add(make_entry(SOURCES[source], outcomes[index]))
        lane.tick()
    while lane.has_work:
        lane.tick()
    results = [outcomes[index][0].result for index in (0, 2, 3, 4)]
    assert [result[0].token_ids for result in results] == [hypothesis.token_ids for hypothesis in alone]  # type: ignore[index]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_a_former_row_left_in_a_slot_does_not_reach_the_next_one(bundle: Bundle, value: float) -> None:
    model = load_model(bundle, variant="cpu-fp32", use_shortlist=True)
    runner = OnnxRunner(model, max_rows=2)
    shortlist = tiny_shortlist()
    ids = [40, 41, 0]
    row = SourceRow(slot=0, source_ids=ids, max_target_tokens=5, candidates=shortlist.candidates(ids))
    first = np.zeros(1, dtype=np.int64)
    runner.admit(0, [row])
    clean = runner.step(0, first, first)
    buffers = runner._buffers[0]
    assert buffers is not None
    for array in buffers.arrays.values():
        array.fill(value)
    runner.admit(0, [row])
    again = runner.step(0, first, first)
    assert again.token_ids.tolist() == clean.token_ids.tolist()
    assert again.log_probs.tolist() == clean.log_probs.tolist()


def test_a_runner_that_needs_candidates_says_so(bundle: Bundle) -> None:
    runner = OnnxRunner(load_model(bundle, variant="cpu-int8", use_shortlist=True), max_rows=2)
    with pytest.raises(ValueError, match="every row needs candidates"):
        runner.admit(0, [SourceRow(slot=0, source_ids=[5, 0], max_target_tokens=5)])
    with pytest.raises(RuntimeError, match="group 1 has no rows"):
        runner.step(1, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    with pytest.raises(RuntimeError, match="group 1 has no rows"):
        runner.move(1, from_slot=1, to_slot=0)


@pytest.mark.parametrize("use_shortlist", [True, False])
async def test_two_workers_share_the_sessions_and_give_the_same_answers(
    bundle: Bundle, use_shortlist: bool
) -> None:
    requests = [TranslationRequest((text, text.upper()), "en", "pt") for text in tiny_texts(18)]
    answers = []
    for num_workers, together in ((1, False), (2, True)):
        engine = Engine.open(
            [bundle], EngineOptions(num_workers=num_workers, max_rows=4, use_shortlist=use_shortlist)
        )
        engine.start()
        if together:
            results = await asyncio.gather(*map(engine.translate, requests))
        else:
            results = [await engine.translate(request) for request in requests]
        answers.append([result.texts for result in results])
        assert await engine.stop(drain_s=30.0)
    texts = [[[part.text for part in result] for result in results] for results in answers]
    assert texts[0] == texts[1]
    assert len({text for parts in texts[0] for text in parts}) > 6


def test_the_runner_states_what_the_manifest_says(bundle: Bundle) -> None:
    runner = OnnxRunner(load_model(bundle, variant="cpu-int8", use_shortlist=False), max_rows=3)
    assert runner.vocabulary_size == bundle.manifest.sizes.vocabulary_size
    assert runner.groups[-1].source_length == bundle.manifest.limits.max_source_tokens
