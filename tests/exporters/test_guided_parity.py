"""Guided graphs against the same search over PyTorch's uncached forward pass, logits adjusted in numpy."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from beam_reference import Logits, Prefix, guided_sum, search_guided
from integer_steps import IntegerSteps
from tiny_models import tiny_checkpoint, tiny_options, tiny_texts

from app.bundle import Bundle
from app.bundle.manifest import Variant
from app.decoding.beam import BeamOptions
from app.decoding.guidance import Guidance
from app.decoding.hypothesis import FinishReason, Hypothesis
from app.decoding.options import DecodingOptions
from app.decoding.search import make_search
from app.runtime.entry import Entry, Outcome
from app.runtime.events import SilentObserver
from app.runtime.lane import Lane
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.runner import BeamStepInput, Int32Array, LogitAdjustments, SearchKind, SourceRow
from app.text import Tokenizer
from exporters.checkpoint import AlignmentHeads, Checkpoint
from exporters.export import export_bundle, without_unknown
from exporters.quantization import quantized
from exporters.torch_reference import to_module
from model.transformer import Transformer

LIMIT = 10
UNKNOWN_ID = 1
NUM_SOURCES = 3
# Pre-norm: the post-norm ones of this size say one token for ever.
MODELS: dict[str, tuple[dict[str, Any], AlignmentHeads]] = {
    "attention": ({"decoder_cell": "attention", "norm": "pre"}, AlignmentHeads()),
    "gated": (
        {"decoder_cell": "gated_attention", "decoder_query_heads": 8, "norm": "pre"},
        AlignmentHeads(),
    ),
    "ssru": ({"decoder_cell": "ssru", "norm": "pre", "start_id": 5}, AlignmentHeads(layer=-2, heads=(2,))),
}


class Job(NamedTuple):
    """One segment and what is asked of it."""

    source: int
    options: DecodingOptions
    guidance: Guidance | None
    candidates: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Exported:
    checkpoint: Checkpoint
    module: Transformer
    bundle: Bundle
    models: dict[tuple[Variant, bool], OnnxModel]
    sources: list[list[int]]
    kept: dict[tuple[Variant, int, bool], Logits] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def integer_steps(self) -> IntegerSteps:
        layers = range(self.checkpoint.config.decoder_layers)
        return IntegerSteps(
            self.bundle,
            self.models["cpu-int8", False],
            self.sources,
            layer=layers[self.checkpoint.alignment.layer],
        )

    def logits(self, variant: Variant, job: Job, shortlist: bool) -> Logits:
        """The reference of a job with its source's own candidates; kept, for many jobs ask alike."""
        key = variant, job.source, shortlist
        if key not in self.kept:
            make = torch_logits if variant == "cpu-fp32" else int8_logits
            self.kept[key] = make(self, job, shortlist)
        return self.kept[key]

    def candidates(self, job: Job) -> Int32Array:
        if job.candidates is not None:
            return np.array(job.candidates, dtype=np.int32)
        assert self.checkpoint.shortlist is not None
        return self.checkpoint.shortlist.candidates(self.sources[job.source])


@pytest.fixture(scope="module", params=list(MODELS))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.set_num_threads(1)
    config, alignment = MODELS[request.param]
    checkpoint = dataclasses.replace(tiny_checkpoint(shortlist=True, **config), alignment=alignment)
    folder: Path = tmp_path_factory.mktemp("guided") / "tiny"
    options = dataclasses.replace(tiny_options(), verification_texts=tiny_texts(2))
    bundle = export_bundle(checkpoint, folder, options)
    tokenizer = Tokenizer.open(bundle.file(bundle.manifest.tokenizer), eos_id=0)
    variants: tuple[Variant, ...] = ("cpu-fp32", "cpu-int8")
    reference = quantized(without_unknown(checkpoint))
    return Exported(
        checkpoint=reference,
        module=to_module(reference).double(),  # so that only the graphs round
        bundle=bundle,
        models={
            (variant, short): load_model(bundle, variant=variant, use_shortlist=short)
            for variant in variants
            for short in (False, True)
        },
        sources=tokenizer.encode_sources(tiny_texts(NUM_SOURCES)),
    )


def decode(
    exported: Exported, variant: Variant, shortlist: bool, jobs: Sequence[Job]
) -> list[tuple[Hypothesis, ...]]:
    """Decode all jobs together in one lane."""
    runner = OnnxRunner(exported.models[variant, shortlist], max_rows=32)
    lane = Lane("tiny", runner, max_admission_tokens=64, observer=SilentObserver())
    outcomes: list[list[Outcome]] = [[] for _ in jobs]
    for job, heard in zip(jobs, outcomes, strict=True):
        lane.add(
            Entry(
                exported.sources[job.source],
                make_search(job.options, eos_id=0, max_target_tokens=LIMIT, guidance=job.guidance),
                max_target_tokens=LIMIT,
                submitted_at_s=0.0,
                deliver=heard.append,
                candidates=exported.candidates(job) if shortlist else None,
            )
        )
    while lane.has_work:
        lane.tick()
    results = []
    for (outcome,) in outcomes:
        assert isinstance(outcome.result, tuple), outcome.result
        results.append(outcome.result)
    return results


def torch_logits(exported: Exported, job: Job, shortlist: bool) -> Logits:
    module = exported.module
    source_ids = torch.tensor([exported.sources[job.source]])
    mask = torch.ones_like(source_ids, dtype=torch.bool)
    allowed = exported.candidates(job).tolist() if shortlist else slice(None)
    with torch.no_grad():
        cross = module.cross_keys_values(module.encode(source_ids, mask))

    @functools.cache
    @torch.no_grad()
    def logits(target: Prefix) -> npt.NDArray[np.float64]:
        inputs = module.shift_right(torch.tensor([[*target, 0]]))
        hidden, _ = module.decode(inputs, module.initial_state(1), cross, mask)
        row = module.project(hidden)[0, len(target)]
        limited = torch.full_like(row, -1e9)
        limited[allowed] = row[allowed]
        return np.asarray(limited.numpy())

    return logits


def int8_logits(exported: Exported, job: Job, shortlist: bool) -> Logits:
    steps = exported.integer_steps
    disallowed = np.ones(exported.checkpoint.config.vocabulary_size, dtype=bool)
    disallowed[exported.candidates(job) if shortlist else slice(None)] = False

    @functools.cache
    def logits(target: Prefix) -> npt.NDArray[np.float32]:
        row = steps.after(job.source, target).logits.copy()
        row[disallowed] = -1e9
        return row

    return logits


def beam_options(options: DecodingOptions) -> BeamOptions:
    return BeamOptions(
        beam_size=options.beam_size,
        num_hypotheses=options.num_hypotheses,
        length_penalty=options.length_penalty,
        normalisation=options.normalisation,
        patience=options.patience,
        max_target_tokens=LIMIT,
    )


def unguided(exported: Exported, shortlist: bool) -> list[Prefix]:
    jobs = [Job(source, DecodingOptions(), None) for source in range(len(exported.sources))]
    return [best.token_ids for best, *_ in decode(exported, "cpu-fp32", shortlist, jobs)]


WISHES = ["neutral", "long", "unrepeated", "forbidden", "prefix", "all"]


def wish(name: str, plain: Prefix) -> tuple[DecodingOptions, Guidance]:
    """Options and guidance that the unguided answer does not fulfil."""
    ids = (*plain, 9, 11, 13)
    away = ((ids[0],), (40, 41, 42), *itertools.pairwise(ids[1:]))
    return {
        "neutral": (DecodingOptions(beam_size=4, num_hypotheses=4), Guidance()),
        "long": (DecodingOptions(beam_size=3), Guidance(min_target_tokens=len(plain) + 3)),
        "unrepeated": (
            DecodingOptions(beam_size=4, num_hypotheses=2, length_penalty=0.0),
            Guidance(no_repeat_ngram_size=2, repetition_penalty=1.7),
        ),
        "forbidden": (DecodingOptions(beam_size=2, num_hypotheses=2), Guidance(forbidden=away)),
        "prefix": (DecodingOptions(beam_size=3, length_penalty=0.6), Guidance(prefix=(50, 7, 50))),
        "all": (
            DecodingOptions(),
            Guidance(
                min_target_tokens=6,
                no_repeat_ngram_size=1,
                repetition_penalty=1.3,
                forbidden=away,
                prefix=(61, 12),
                keeps_attention=True,
            ),
        ),
    }[name]


@pytest.mark.parametrize("shortlist", [False, True])
def test_float_graphs_find_what_the_same_search_finds_over_pytorch(
    exported: Exported, shortlist: bool
) -> None:
    plain = unguided(exported, shortlist)
    jobs = [Job(at, *wish(name, ids)) for name in WISHES for at, ids in enumerate(plain)]
    num_changed = 0
    for job, ranked in zip(jobs, decode(exported, "cpu-fp32", shortlist, jobs), strict=True):
        assert job.guidance is not None
        logits = exported.logits("cpu-fp32", job, shortlist)
        expected = search_guided(logits, beam_options(job.options), job.guidance)
        assert [h.token_ids for h in ranked] == [h.token_ids for h in expected]
        for one, other in zip(ranked, expected, strict=True):
            assert one.score == pytest.approx(other.score, abs=5e-4)
            assert one.finish_reason is other.finish_reason
            total = guided_sum(logits, job.guidance, one)
            assert one.sum_log_probs == pytest.approx(total, abs=1e-3)
        num_changed += ranked[0].token_ids != plain[job.source]
    assert num_changed > len(jobs) // 2, "the guidance must matter"


@pytest.mark.parametrize("shortlist", [False, True])
def test_integer_graphs_find_what_the_same_search_finds_over_the_integer_logits(
    exported: Exported, shortlist: bool
) -> None:
    plain = unguided(exported, shortlist)
    jobs = [Job(at, *wish(name, ids)) for name in WISHES for at, ids in enumerate(plain)]
    for job, ranked in zip(jobs, decode(exported, "cpu-int8", shortlist, jobs), strict=True):
        assert job.guidance is not None
        logits = exported.logits("cpu-int8", job, shortlist)
        expected = search_guided(logits, beam_options(job.options), job.guidance)
        # Another kernel's last bit may turn an activation to the next integer: near ties may differ.
        assert [h.score for h in ranked] == pytest.approx([h.score for h in expected], abs=0.02)
        for one in ranked:
            assert one.sum_log_probs == pytest.approx(guided_sum(logits, job.guidance, one), abs=0.1)


def test_neutral_guidance_gives_what_the_beam_graph_gives(exported: Exported) -> None:
    """No adjustment at all: M is 0 at every step."""
    for variant, shortlist in exported.models:
        for options in (DecodingOptions(), DecodingOptions(beam_size=4, num_hypotheses=4)):
            sources = range(len(exported.sources))
            plain = decode(exported, variant, shortlist, [Job(at, options, None) for at in sources])
            guided = decode(exported, variant, shortlist, [Job(at, options, Guidance()) for at in sources])
            for one, other in zip(plain, guided, strict=True):
                assert [h.token_ids for h in one] == [h.token_ids for h in other]
                assert [h.score for h in one] == pytest.approx([h.score for h in other], abs=1e-5)


def cross_attention(exported: Exported, source: int, target: Prefix) -> npt.NDArray[np.float32]:
    """PyTorch's cross-attention at every position of a target, [T+1,H,S], from an uncached pass."""
    layer: Any = list(exported.module.decoder)[exported.checkpoint.alignment.layer]
    seen: list[torch.Tensor] = []

    def look(module: Any, inputs: tuple[Any, ...], _: torch.Tensor) -> None:
        hidden, (keys, _values), mask = inputs  # [1,T,d], [1,H,S,D], [1,1,1,S]
        assert mask.all()
        width = keys.shape[-1]
        queries = module.query(hidden)[0].unflatten(-1, (-1, width))  # [T,H,D]
        seen.append((torch.einsum("thd,hsd->ths", queries, keys[0]) / width**0.5).softmax(-1))

    hook = layer.cross_attention.register_forward_hook(look)
    ids = torch.tensor([exported.sources[source]])
    with torch.no_grad():
        exported.module(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([[*target, 0]]))
    hook.remove()
    (weights,) = seen
    return np.asarray(weights.numpy())


@pytest.mark.parametrize("variant", ["cpu-fp32", "cpu-int8"])
def test_each_token_comes_with_the_attention_of_the_step_that_chose_it(
    exported: Exported, variant: Variant
) -> None:
    options = DecodingOptions(beam_size=4, num_hypotheses=4, patience=2.0)
    guidance = Guidance(keeps_attention=True, no_repeat_ngram_size=2, prefix=(50,))
    jobs = [Job(source, options, guidance) for source in range(NUM_SOURCES)]
    heads = exported.checkpoint.alignment.heads
    for job, ranked in zip(jobs, decode(exported, variant, True, jobs), strict=True):
        num_source = len(exported.sources[job.source])
        for one in ranked:
            assert one.attention is not None
            assert len(one.attention) == len(one.token_ids)
            assert not one.attention[:, num_source:].any(), "nothing looks at padding"
            weights = (
                cross_attention(exported, job.source, one.token_ids)
                if variant == "cpu-fp32"
                else exported.integer_steps.attention(job.source, one.token_ids)
            )
            chosen = weights if heads is None else weights[:, list(heads)]
            expected = chosen.mean(1)[: len(one.token_ids)]
            assert one.attention[:, :num_source] == pytest.approx(
                expected, abs=5e-4 if variant == "cpu-fp32" else 0.02
            )


def test_adjusting_what_the_shortlist_lacks_changes_nothing(exported: Exported) -> None:
    options = DecodingOptions(beam_size=2)
    for variant in ("cpu-fp32", "cpu-int8"):
        for source in range(len(exported.sources)):
            job = Job(source, options, Guidance())
            known = set(exported.candidates(job).tolist())
            others = tuple((token_id,) for token_id in range(1, 96) if token_id not in known)
            assert others
            jobs = [job, job._replace(guidance=Guidance(forbidden=others))]
            # The second has a neighbour with other candidates: what it lacks is in the union.
            jobs.append(Job((source + 1) % NUM_SOURCES, options, Guidance()))
            plain, guided, _ = decode(exported, variant, True, jobs)
            assert [h.token_ids for h in plain] == [h.token_ids for h in guided]
            assert [h.score for h in plain] == pytest.approx([h.score for h in guided], abs=1e-5)


ONLY_THESE = (0, 20, 30, 40)


def test_what_no_row_may_say_has_no_column_that_an_adjustment_could_reach(exported: Exported) -> None:
    runner = OnnxRunner(exported.models["cpu-fp32", True], max_rows=4)
    group = next(
        index
        for index, group in enumerate(runner.groups)
        if group.kind is SearchKind.GUIDED and group.num_beams == 2
    )
    candidates = np.array(ONLY_THESE, dtype=np.int32)
    row = SourceRow(0, exported.sources[0], max_target_tokens=4, candidates=candidates)

    def best(token_ids: Sequence[int]) -> tuple[list[list[int]], list[list[float]]]:
        runner.admit(group, [row])  # a step changes its state
        count = len(token_ids)
        raised = LogitAdjustments(
            rows=np.zeros(count, dtype=np.int64),
            token_ids=np.array(token_ids, dtype=np.int64),
            divisors=np.ones(count, dtype=np.float32),
            addends=np.full(count, 2e9, dtype=np.float32),
        )
        beams = BeamStepInput(
            last_ids=np.zeros((1, 2), dtype=np.int64),
            positions=np.zeros(1, dtype=np.int64),
            scores=np.array([[0.0, -np.inf]], dtype=np.float32),
            parents=np.array([[0, 1]]),
            num_candidates=4,
            adjustments=raised,
        )
        output = runner.beam_step(group, beams)
        return output.token_ids.tolist(), output.scores.tolist()

    assert best([95, 7]) == best([])
    (tokens, *_), _ = best([40])
    assert tokens[0] == 40


def test_when_the_shortlist_leaves_two_tokens_only_they_are_chosen(exported: Exported) -> None:
    guidance = Guidance(min_target_tokens=LIMIT + 1, forbidden=((30,),))
    job = Job(0, DecodingOptions(beam_size=2), guidance, candidates=ONLY_THESE)
    (found,), _ = decode(exported, "cpu-fp32", True, [job, Job(1, DecodingOptions(beam_size=2), Guidance())])
    assert set(found.token_ids) <= {20, 40}
    assert found.finish_reason is FinishReason.LENGTH


def test_when_all_of_a_shortlist_is_forbidden_nothing_outside_it_is_chosen(exported: Exported) -> None:
    guidance = Guidance(min_target_tokens=LIMIT + 1, forbidden=((20,), (30,), (40,)), prefix=(30,))
    job = Job(0, DecodingOptions(beam_size=2), guidance, candidates=ONLY_THESE)
    (found,), _ = decode(exported, "cpu-fp32", True, [job, Job(1, DecodingOptions(beam_size=2), Guidance())])
    assert (found.token_ids, found.finish_reason) == ((30,), FinishReason.FORBIDDEN)


def test_when_all_that_a_model_may_say_is_forbidden_the_unknown_piece_is_not_chosen(
    exported: Exported,
) -> None:
    every = tuple((token_id,) for token_id in range(1, 96) if token_id != UNKNOWN_ID)
    guidance = Guidance(min_target_tokens=LIMIT + 1, forbidden=every, prefix=(30,))
    ((found,),) = decode(exported, "cpu-fp32", False, [Job(0, DecodingOptions(beam_size=2), guidance)])
    assert (found.token_ids, found.finish_reason) == ((30,), FinishReason.FORBIDDEN)
