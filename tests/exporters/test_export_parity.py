"""Exported graphs against PyTorch, and a sentence alone against itself among neighbours."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tiny_models import tiny_checkpoint, tiny_options, tiny_texts

from app.bundle import Bundle, Variant, open_bundle
from app.decoding.greedy import GreedySearch
from app.decoding.hypothesis import Hypothesis
from app.decoding.shortlist import Shortlist
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel, load_model, session_options
from app.runtime.onnx_runner import OnnxRunner
from app.text import Tokenizer
from exporters.export import export_bundle
from exporters.graph_builder import FLOAT, INT64, GraphBuilder
from exporters.sublayers import position_codes
from exporters.token_choice import block_size, choose
from exporters.verification import MAX_SCORE_DIFFERENCE
from exporters.weight_store import WeightStore
from model.positions import position_codes as torch_position_codes

SCALES = {
    "encoder.0.ffn.inner.weight": 0.03,
    "encoder.0.ffn.outer.weight": 0.05,
    "decoder.0.cross_attention.query.weight": 0.02,
    "embedding.weight": 0.04,
}
# Every choice of the configuration appears at least twice, beside different others.
MODELS: dict[str, dict[str, object]] = {
    "paper": {"start_id": 0},
    "marian": {"decoder_cell": "ssru", "positions": "halves", "shortlist": True, "activation_scales": SCALES},
    "pre-norm gelu": {"norm": "pre", "activation": "gelu", "start_id": 5, "shortlist": True},
    "pre-norm silu ssru": {"norm": "pre", "activation": "silu", "decoder_cell": "ssru", "encoder_layers": 1},
    "prime vocabulary": {
        "vocabulary_size": 1031,
        "positions": "halves",
        "activation": "silu",
        "num_heads": 2,
    },
    "prime vocabulary, shortlist": {
        "vocabulary_size": 1031,
        "shortlist": True,
        "encoder_layers": 3,
        "decoder_cell": "ssru",
    },
    "gated": {
        "decoder_cell": "gated_attention",
        "decoder_query_heads": 8,
        "shortlist": True,
        "activation_scales": SCALES | {"decoder.0.self_attention.gate.weight": 0.03},
    },
    "pre-norm gated": {
        "decoder_cell": "gated_attention",
        "decoder_query_heads": 12,
        "norm": "pre",
        "start_id": 5,
    },
    "scales": {"activation_scales": SCALES, "norm": "pre", "start_id": 7, "activation": "gelu"},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=list(MODELS))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("export") / "tiny"
    export_bundle(tiny_checkpoint(**MODELS[request.param]), path, tiny_options())
    return open_bundle(path)


def test_fp32_graphs_say_what_pytorch_says(bundle: Bundle) -> None:
    reports = {report.variant: report for report in bundle.manifest.verification}
    assert reports["cpu-fp32"].num_segments == len(tiny_texts())
    assert reports["cpu-fp32"].num_identical == len(tiny_texts())
    assert reports["cpu-fp32"].max_score_difference <= MAX_SCORE_DIFFERENCE
    assert reports["cpu-int8"].num_segments == len(tiny_texts())


def sources_of(bundle: Bundle) -> list[list[int]]:
    tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=bundle.manifest.tokens.eos_id)
    return [tokenizer.encode_source(text) for text in tiny_texts(18)]


def decode(
    model: OnnxModel,
    sources: Sequence[Sequence[int]],
    shortlist: Shortlist | None,
    *,
    max_rows: int,
    seed: int | None = None,
    cancelled: Sequence[Sequence[int]] = (),
) -> list[Hypothesis]:
    """Decode with one lane; with a seed, entries arrive between steps and others are cancelled."""
    runner = OnnxRunner(model, max_rows=max_rows)
    lane = Lane("tiny", runner, max_admission_tokens=64, observer=SilentObserver())
    outcomes: dict[int, Outcome] = {}
    choice = random.Random(seed)

    def entry_of(index: int, ids: Sequence[int]) -> Entry:
        limit = min(24, 3 + 2 * len(ids))
        return Entry(
            ids,
            GreedySearch(eos_id=model.manifest.tokens.eos_id, max_target_tokens=limit),
            max_target_tokens=limit,
            submitted_at_s=0.0,
            deliver=lambda outcome: outcomes.__setitem__(index, outcome),
            candidates=None if shortlist is None else shortlist.candidates(ids),
        )

    arrivals = [entry_of(index, ids) for index, ids in enumerate(sources)]
    guests = [entry_of(-1 - index, ids) for index, ids in enumerate(cancelled)]
    everyone = [*arrivals, *guests]
    if seed is not None:
        choice.shuffle(everyone)
    while everyone or lane.has_work:
        for _ in range(len(everyone) if seed is None else min(len(everyone), choice.randint(0, 3))):
            lane.add(everyone.pop())
        lane.tick()
        if guests and choice.random() < 0.3:
            guests.pop().cancel()
    results = [outcomes[index].result for index in range(len(sources))]
    assert all(isinstance(result, tuple) for result in results)
    return [result[0] for result in results if isinstance(result, tuple)]


@pytest.mark.parametrize("use_shortlist", [True, False])
@pytest.mark.parametrize("variant", ["cpu-int8", "cpu-fp32"])
def test_a_sentence_alone_says_the_same_in_any_company(
    bundle: Bundle, variant: Variant, use_shortlist: bool
) -> None:
    name = bundle.manifest.shortlist
    if use_shortlist and name is None:
        pytest.skip("this model has no shortlist")
    shortlist = Shortlist.load(bundle.file(name)) if use_shortlist and name else None
    model = load_model(bundle, variant=variant, use_shortlist=use_shortlist)
    sources = sources_of(bundle)
    alone = [decode(model, [ids], shortlist, max_rows=1)[0] for ids in sources]
    assert len({token for hypothesis in alone for token in hypothesis.token_ids}) > 3
    together = [
        decode(model, sources, shortlist, max_rows=18),
        decode(model, sources[::-1], shortlist, max_rows=5)[::-1],
        decode(model, sources, shortlist, max_rows=3, seed=1, cancelled=sources[::3]),
        decode(model, sources, shortlist, max_rows=7, seed=2, cancelled=sources[1::4]),
    ]
    for hypotheses in together:
        for hypothesis, expected in zip(hypotheses, alone, strict=True):
            assert hypothesis.token_ids == expected.token_ids
            assert hypothesis.finish_reason == expected.finish_reason
            assert abs(hypothesis.sum_log_probs - expected.sum_log_probs) <= 1e-6 * hypothesis.num_decoded


def run(builder: GraphBuilder, folder: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    onnx.save_model(builder.build(), str(folder / "graph.onnx"))
    session = onnxruntime.InferenceSession(
        str(folder / "graph.onnx"), session_options(), providers=["CPUExecutionProvider"]
    )
    outputs: list[np.ndarray] = session.run(None, feeds)
    return outputs


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("d_model", [4, 36])
def test_the_graph_computes_the_models_position_codes(tmp_path: Path, layout: str, d_model: int) -> None:
    store = WeightStore()
    graph = GraphBuilder("positions", store)
    graph.input("unused", FLOAT, [1])
    checkpoint = tiny_checkpoint(positions=layout, d_model=d_model, num_heads=2)
    graph.output(position_codes(graph, checkpoint, 700), "codes", FLOAT, ["P", d_model])
    store.write(tmp_path / "weights.bin")
    (codes,) = run(graph, tmp_path, {"unused": np.zeros(1, np.float32)})
    expected = torch_position_codes(700, d_model, layout=layout).numpy()  # type: ignore[arg-type]
    assert codes.shape == expected.shape
    assert np.abs(codes - expected).max() <= 1e-6


@pytest.mark.parametrize("size", [2, 15, 16, 96, 97, 1031, 2062, 4096])
def test_the_choice_is_the_first_largest_whatever_the_size_of_the_vocabulary(
    tmp_path: Path, size: int
) -> None:
    block = block_size(size)
    assert block is None or size % block == 0
    choice = np.random.default_rng(size)
    logits = choice.integers(-3, 4, (40, size)).astype(np.float32)  # many ties
    logits[0] = 0.0
    logits[1, -1] = 9.0
    logits[2] = -1e9
    graph = GraphBuilder("choose", WeightStore())
    index, largest = choose(graph, graph.input("logits", FLOAT, ["R", size]), block)
    graph.output(index, "index", INT64, ["R"])
    graph.output(largest, "largest", FLOAT, ["R"])
    found_index, found_largest = run(graph, tmp_path, {"logits": logits})
    assert found_index.tolist() == logits.argmax(axis=1).tolist()
    assert found_largest.tolist() == logits.max(axis=1).tolist()
