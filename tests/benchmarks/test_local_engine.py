from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from app.bundle import Bundle
from app.decoding.options import DecodingOptions
from app.errors import ShuttingDown, WorkerFailed
from app.runtime.onnx_model import load_model
from app.text import Tokenizer
from benchmarks.local_engine import LocalEngine, load_shortlist, num_tokens
from benchmarks.watched_model import node_seconds, profiled_model, timed_model
from exporters.export import export_bundle
from tests.tiny_models import tiny_checkpoint, tiny_options, tiny_texts


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("local-engine") / "tiny"
    return export_bundle(tiny_checkpoint(shortlist=True), folder, tiny_options())


@pytest.fixture(scope="module")
def sources(bundle: Bundle) -> list[list[int]]:
    manifest = bundle.manifest
    tokenizer = Tokenizer.open(bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)
    return tokenizer.encode_sources(list(tiny_texts()))


@pytest.mark.parametrize("use_shortlist", [False, True])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_all_at_once_and_one_by_one_give_the_same(bundle, sources, use_shortlist, beam_size):
    options = DecodingOptions(beam_size=beam_size, num_hypotheses=beam_size)
    with LocalEngine.open(
        bundle, variant="cpu-fp32", use_shortlist=use_shortlist, num_threads=2, max_rows=4
    ) as engine:
        together = engine.translate(sources, options)
        alone = engine.one_by_one(sources, options)
    assert [[h.token_ids for h in hypotheses] for hypotheses in together] == [
        [h.token_ids for h in hypotheses] for hypotheses in alone
    ]
    assert all(len(hypotheses) == beam_size for hypotheses in together)


def test_each_segment_keeps_its_own_limit(bundle, sources):
    limits = [1 + index % 3 for index in range(len(sources))]
    with LocalEngine.open(bundle, num_threads=2) as engine:
        results = engine.translate(sources, max_target_tokens=limits)
    assert all(found[0].num_decoded <= limit for found, limit in zip(results, limits, strict=True))
    assert num_tokens(results) == sum(found[0].num_decoded for found in results) > 0


def test_a_failing_graph_raises_instead_of_hanging(bundle, sources):
    class Broken:
        def __init__(self, session):
            self._session = session

        def run(self, *_):
            raise RuntimeError("no such kernel")

        def __getattr__(self, name):
            return getattr(self._session, name)

    model = load_model(bundle, variant="cpu-int8", use_shortlist=False)
    broken = dataclasses.replace(model, encoder=Broken(model.encoder))
    with LocalEngine(broken) as engine:
        with pytest.raises(WorkerFailed):
            engine.translate(sources[:2])
        with pytest.raises(WorkerFailed):
            engine.one_by_one(sources[:2])


def test_an_engine_that_was_stopped_or_never_started_raises_instead_of_hanging(bundle, sources):
    engine = LocalEngine.open(bundle)
    with pytest.raises(WorkerFailed, match="never started"):
        engine.translate(sources[:1])
    with LocalEngine.open(bundle) as stopped:
        pass
    with pytest.raises(ShuttingDown):
        stopped.translate(sources[:1])


def test_a_bundle_without_a_shortlist_is_not_measured_with_one(tmp_path: Path):
    bare = export_bundle(tiny_checkpoint(), tmp_path / "bare", tiny_options())
    with pytest.raises(ValueError, match="no shortlist"):
        LocalEngine.open(bare, use_shortlist=True)


def test_timing_the_graphs_changes_no_answer_and_sees_every_call(bundle, sources):
    model = load_model(bundle, variant="cpu-int8", use_shortlist=True)
    watched, times = timed_model(model)
    shortlist = load_shortlist(bundle)
    with LocalEngine(model, shortlist=shortlist) as plain:
        expected = plain.one_by_one(sources)
    with LocalEngine(watched, shortlist=shortlist) as engine:
        assert engine.one_by_one(sources) == expected
    assert times.calls["encoder"] == len(sources)
    assert times.calls["step"] == num_tokens(expected)
    assert all(seconds > 0 for seconds in times.seconds.values())


def test_the_profiler_names_the_operators_of_both_graphs(bundle, sources, tmp_path: Path):
    model = profiled_model(bundle, tmp_path, use_shortlist=False)
    with LocalEngine(model) as engine:
        engine.one_by_one(sources[:2])
    found = node_seconds(model)
    assert found["encoder"]["MultiHeadAttention"] > 0
    assert found["step"]["GroupQueryAttention"] > 0
