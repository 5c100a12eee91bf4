"""Guided requests through the engine and a shipped bundle: what was asked is so, nothing else changes."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.bundle import Bundle, default_directory, discover
from app.decoding.guided import GuidedBeamSearch
from app.decoding.hypothesis import FinishReason
from app.decoding.options import DecodingOptions
from app.errors import InvalidOption
from app.runtime import dispatch as dispatch_module
from app.runtime.engine import Engine, EngineOptions
from app.runtime.request import TextResult, TranslationRequest, TranslationResult, WarningCode
from app.runtime.served_model import ServedModel, load_served_model

TEXTS = (
    "The old cat sleeps on the red chair near the window.",
    "My brother bought two books about the history of Lisbon.",
    "Does the train to Porto leave before seven in the morning?",
    "She said that nobody had seen the keys since Monday.",
)
LAUGH = "Ha ha ha ha ha ha ha ha ha ha ha ha."


@pytest.fixture(scope="module")
def model() -> ServedModel:
    bundles: list[Bundle] = [
        bundle for bundle in discover(default_directory()) if bundle.manifest.pairs[0].source == "en"
    ]
    return load_served_model(bundles[0], variant="cpu-int8", max_rows=32, use_shortlist=True)


@pytest.fixture
async def engine(model: ServedModel) -> AsyncIterator[Engine]:
    engine = Engine([model], EngineOptions(num_workers=1))
    engine.start()
    yield engine
    await engine.stop(drain_s=30)
    assert engine.num_waiting_tokens == 0


async def translate(
    engine: Engine, *texts: str, prefixes: tuple[str, ...] = (), **options: Any
) -> tuple[TextResult, ...]:
    request = TranslationRequest(texts, "en", "pt", DecodingOptions(**options), target_prefixes=prefixes)
    return (await engine.translate(request)).texts


@pytest.mark.parametrize("beam_size", [1, 4])
async def test_a_translation_has_the_fewest_tokens_asked_for(engine: Engine, beam_size: int) -> None:
    free = await translate(engine, *TEXTS, beam_size=beam_size)
    least = max(text.segments[0].num_target_tokens for text in free) + 3
    for text in await translate(engine, *TEXTS, beam_size=beam_size, min_target_tokens=least):
        assert text.segments[0].num_target_tokens >= least
    for text in await translate(engine, *TEXTS, beam_size=beam_size, min_target_ratio=1.75):
        (segment,) = text.segments
        assert segment.num_target_tokens >= 1.75 * segment.num_source_tokens
    again = await translate(engine, *TEXTS, beam_size=beam_size, min_target_tokens=2)
    assert [text.text for text in again] == [text.text for text in free]


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
async def test_no_sequence_of_tokens_comes_twice(engine: Engine, beam_size: int, size: int) -> None:
    def num_repeats(tokens: tuple[str, ...]) -> int:
        grams = list(zip(*(tokens[start:] for start in range(size)), strict=False))
        return len(grams) - len(set(grams))

    async def tokens_of(**options: Any) -> tuple[str, ...]:
        (text,) = await translate(engine, LAUGH, beam_size=beam_size, alignment=True, **options)
        alignment = text.segments[0].alignment
        assert alignment is not None
        return alignment.target_tokens

    assert num_repeats(await tokens_of()) > 0
    assert num_repeats(await tokens_of(no_repeat_ngram_size=size)) == 0


async def test_a_penalty_on_repetition_makes_repeats_rarer(engine: Engine) -> None:
    (free,) = await translate(engine, LAUGH)
    (held,) = await translate(engine, LAUGH, repetition_penalty=5.0)
    assert free.text.lower().count("ha") > held.text.lower().count("ha")


@pytest.mark.parametrize("beam_size", [1, 4])
async def test_a_forbidden_word_does_not_occur_though_it_would(engine: Engine, beam_size: int) -> None:
    for text in await translate(engine, *TEXTS, beam_size=beam_size):
        for word in re.findall(r"(?<= )\w+", text.text):
            (held,) = await translate(engine, text.segments[0].source, beam_size=beam_size, forbidden=(word,))
            assert not re.search(rf"(?<![\w-]){word}(?!\w)", held.text)


async def test_several_phrases_are_forbidden_together(engine: Engine) -> None:
    phrases = ("gato velho", "velho gato", "na cadeira", "perto da janela")
    (free,) = await translate(engine, TEXTS[0])
    assert any(phrase in free.text for phrase in phrases)
    texts = await translate(engine, TEXTS[0], beam_size=6, num_hypotheses=6, forbidden=phrases)
    for text in (texts[0].text, *texts[0].alternatives):
        assert not any(re.search(rf"\b{phrase}\b", text) for phrase in phrases), text


@pytest.mark.parametrize("beam_size", [1, 4])
async def test_a_translation_starts_with_its_prefix_byte_for_byte(engine: Engine, beam_size: int) -> None:
    free = await translate(engine, *TEXTS)
    for place in (1, 3, 8, 13, 20):
        prefixes = tuple(text.text[:place].rstrip() for text in free)
        for text, prefix in zip(
            await translate(engine, *TEXTS, prefixes=prefixes, beam_size=beam_size), prefixes, strict=True
        ):
            assert text.text.startswith(prefix)
            assert text.segments[0].finish_reason is FinishReason.EOS


@pytest.mark.parametrize("prefix", ["A ga", "O velho ga", "Um", "O gato v", "Gat", "O velho gato dorme na"])
async def test_a_space_at_a_prefixs_end_ends_its_word(engine: Engine, prefix: str) -> None:
    (text,) = await translate(engine, TEXTS[0], prefixes=(prefix + " ",))
    assert text.text == prefix or text.text.startswith(prefix + " ")


async def test_a_prefix_goes_on_as_the_free_translation_does_and_changes_no_other_text(
    engine: Engine,
) -> None:
    free = await translate(engine, *TEXTS)
    words = free[1].text.split(" ")
    prefixes = ("", " ".join(words[: len(words) // 2]) + " ", "", "")
    again = await translate(engine, *TEXTS, prefixes=prefixes)
    assert [text.text for text in again] == [text.text for text in free]
    assert [text.segments[0] for text in (again[0], *again[2:])] == [
        text.segments[0] for text in (free[0], *free[2:])
    ]


async def test_a_whole_translation_as_prefix_ends_at_once(engine: Engine) -> None:
    (free,) = await translate(engine, TEXTS[0])
    (again,) = await translate(engine, TEXTS[0], prefixes=(free.text,))
    assert again.text == free.text


async def test_indents_stay_before_a_prefix_and_later_segments_are_free(engine: Engine) -> None:
    source = f"  {TEXTS[0]}\n{TEXTS[1]}"
    (free,) = await translate(engine, source)
    (text,) = await translate(engine, source, prefixes=("Um",))
    assert text.text.startswith("  Um")
    assert text.segments[1] == free.segments[1]


async def test_one_guided_beam_that_asks_for_next_to_nothing_is_greedy_search(engine: Engine) -> None:
    free = await translate(engine, *TEXTS)
    held = await translate(engine, *TEXTS, min_target_tokens=1)
    assert [text.text for text in held] == [text.text for text in free]
    for ours, theirs in zip(held, free, strict=True):
        assert ours.segments[0].score == pytest.approx(theirs.segments[0].score, abs=1e-4)


async def test_alignment_rows_add_up_to_one_and_names_and_numbers_point_at_themselves(
    engine: Engine,
) -> None:
    (text,) = await translate(
        engine, "Maria met Peter in Berlin in 1987.", alignment=True, beam_size=4, num_hypotheses=4
    )
    (segment,) = text.segments
    alignment = segment.alignment
    assert alignment is not None
    assert len(alignment.source_tokens) == segment.num_source_tokens
    assert alignment.source_tokens[-1] == "</s>"
    assert len(alignment.target_tokens) == segment.num_target_tokens - 1
    assert "".join(alignment.target_tokens).replace("\u2581", " ").strip() == segment.target
    assert len(alignment.weights) == len(alignment.target_tokens)
    for row in alignment.weights:
        assert len(row) == len(alignment.source_tokens)
        assert sum(row) == pytest.approx(1.0, abs=0.002)
        assert all(weight == round(weight, 4) and 0 <= weight <= 1 for weight in row)
    words = {"\u2581Maria": "\u2581Maria", "\u2581Pedro": "\u2581Peter", "\u2581Berlim": "\u2581Berlin"}
    for target, source in (words | {"\u25811987": "\u25811987"}).items():
        row = alignment.weights[alignment.target_tokens.index(target)]
        assert alignment.source_tokens[row.index(max(row))] == source
    assert len(segment.alternatives) == 3


async def test_a_translation_without_an_option_has_no_alignment(engine: Engine) -> None:
    (text,) = await translate(engine, TEXTS[0], min_target_tokens=3)
    assert text.segments[0].alignment is None


async def test_sixteen_beams_with_every_option_at_once(engine: Engine) -> None:
    (text,) = await translate(
        engine,
        TEXTS[0],
        prefixes=("O velho ",),
        beam_size=16,
        num_hypotheses=16,
        patience=2.0,
        length_penalty=0.5,
        min_target_tokens=6,
        min_target_ratio=0.5,
        max_target_tokens=30,
        max_target_ratio=4.0,
        no_repeat_ngram_size=3,
        repetition_penalty=1.2,
        forbidden=(*(f"palavra {number}" for number in range(99)), "janela"),
        alignment=True,
    )
    targets = [text.segments[0].target, *(other.target for other in text.segments[0].alternatives)]
    assert len(targets) == 16
    for target in targets:
        assert target.startswith("O velho ")
        assert not re.search(r"\bjanela\b", target)


async def test_neighbours_with_other_options_change_no_answer(engine: Engine) -> None:
    choice = random.Random(5)
    requests = []
    for number in range(64):
        options: dict[str, Any] = {"beam_size": choice.choice([1, 1, 2, 3])}
        if number % 2:
            options["no_repeat_ngram_size"] = choice.choice([0, 1, 2])
            options["repetition_penalty"] = choice.choice([1.0, 1.5])
            options["forbidden"] = choice.choice([(), ("gato", "livros"), ("manhã",)])
            options["min_target_tokens"] = choice.choice([0, 5, 18])
            options["alignment"] = choice.random() < 0.5
        prefix = choice.choice(["", "", "Um", "A ", "Se"])
        requests.append(
            TranslationRequest(
                (choice.choice(TEXTS),), "en", "pt", DecodingOptions(**options), target_prefixes=(prefix,)
            )
        )
    assert 20 < sum(request.is_guided for request in requests) < 64
    alone: dict[TranslationRequest, TranslationResult] = {}
    for request in requests:
        if request not in alone:
            alone[request] = await engine.translate(request)
    together = await asyncio.gather(*(engine.translate(request) for request in requests))
    for request, result in zip(requests, together, strict=True):
        ours, theirs = result.texts[0], alone[request].texts[0]
        assert ours.text == theirs.text
        assert ours.segments[0].finish_reason is theirs.segments[0].finish_reason
        assert ours.segments[0].score == pytest.approx(theirs.segments[0].score, abs=1e-4)


async def test_only_what_a_segment_is_asked_makes_its_search_a_guided_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    guided: list[bool] = []
    make_search = dispatch_module.make_search

    def watched(*args: Any, **kwargs: Any) -> Any:
        search = make_search(*args, **kwargs)
        guided.append(isinstance(search, GuidedBeamSearch))
        return search

    monkeypatch.setattr(dispatch_module, "make_search", watched)
    await translate(engine, TEXTS[0], beam_size=2, num_hypotheses=2, max_target_ratio=2.0)
    await translate(engine, TEXTS[0], TEXTS[1], prefixes=("", "Meu"))
    await translate(engine, TEXTS[0], alignment=True)
    assert guided == [False, False, True, True]


@pytest.mark.parametrize(
    ("options", "prefix"),
    [
        ({"min_target_tokens": 1}, ""),
        ({"min_target_ratio": 0.5}, ""),
        ({"no_repeat_ngram_size": 2}, ""),
        ({"repetition_penalty": 1.5}, ""),
        ({"forbidden": ("a",)}, ""),
        ({"alignment": True}, ""),
        ({}, "O"),
    ],
)
async def test_a_bundle_without_the_graphs_refuses_before_any_work(
    model: ServedModel, options: dict[str, Any], prefix: str
) -> None:
    old = Engine([dataclasses.replace(model, can_guide=False)], EngineOptions(num_workers=1))
    with pytest.raises(InvalidOption, match="export the bundle again"):
        await translate(old, TEXTS[0], prefixes=(prefix,), **options)
    assert old.num_waiting_tokens == old.num_running_requests == 0


async def test_more_tokens_than_the_model_has_places_for_cannot_be_the_least(
    engine: Engine, model: ServedModel
) -> None:
    limit = model.max_target_tokens
    with pytest.raises(InvalidOption, match=rf"min_target_tokens is {limit + 1}; .* at most {limit} tokens"):
        await translate(engine, TEXTS[0], min_target_tokens=limit + 1)
    (text,) = await translate(engine, "Yes.", min_target_tokens=limit, max_target_ratio=2.0)
    assert text.segments[0].num_target_tokens == 2 * text.segments[0].num_source_tokens


async def test_a_refused_phrase_gives_its_tokens_back(engine: Engine) -> None:
    with pytest.raises(InvalidOption, match=r"forbidden\[0\] has 2 characters"):
        await translate(engine, TEXTS[0], forbidden=("日本",))
    with pytest.raises(InvalidOption, match="holds nothing to translate"):
        await translate(engine, TEXTS[0], " ", prefixes=("", "O"))
    assert engine.num_waiting_tokens == 0


async def test_a_cut_translation_is_reported_as_before(engine: Engine) -> None:
    (text,) = await translate(engine, TEXTS[0], min_target_tokens=3, max_target_tokens=4)
    assert text.segments[0].finish_reason is FinishReason.LENGTH
    assert [warning.code for warning in text.warnings] == [WarningCode.TARGET_TRUNCATED]
