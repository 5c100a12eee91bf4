"""Options that guide the choice of tokens, and target prefixes, from the body to the engine and back."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.observability import Metrics

GOOD: dict[str, Any] = {"texts": ["good morning", "you"], "source": "en", "target": "pt"}
WANTED: dict[str, Any] = {
    "min_target_tokens": 3,
    "min_target_ratio": 0.5,
    "no_repeat_ngram_size": 4,
    "repetition_penalty": 1.25,
    "forbidden": ["bad", "São Paulo"],
    "alignment": True,
}


async def refused(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/translate", json=body)
    assert response.status_code == 422, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["retryable"] is False
    return error


async def test_guiding_options_and_prefixes_reach_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    body = {**GOOD, "options": WANTED, "target_prefixes": ["Bom ", ""]}
    assert (await client.post("/v1/translate", json=body)).status_code == 200
    request = engine.requests[-1]
    assert {name: getattr(request.options, name) for name in WANTED} == {
        **WANTED,
        "forbidden": ("bad", "São Paulo"),
    }
    assert request.target_prefixes == ("Bom ", "")
    assert request.is_guided


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"target_prefixes": []},
        {"target_prefixes": ["", ""]},
        {
            "options": {
                "min_target_tokens": 0,
                "min_target_ratio": 0,
                "no_repeat_ngram_size": 0,
                "repetition_penalty": 1,
                "forbidden": [],
                "alignment": False,
            }
        },
    ],
)
async def test_neutral_values_ask_for_nothing(
    client: httpx.AsyncClient, engine: FakeEngine, more: dict[str, Any]
) -> None:
    response = await client.post("/v1/translate", json={**GOOD, **more})
    assert response.status_code == 200
    assert not engine.requests[-1].is_guided
    assert response.json()["texts"][0]["segments"][0]["alignment"] is None


async def test_an_alignment_names_the_tokens_of_both_sides(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/translate", json={**GOOD, "options": {"alignment": True}})
    (segment,) = response.json()["texts"][0]["segments"]
    assert segment["alignment"] == {
        "source_tokens": ["▁a", "</s>"],
        "target_tokens": ["▁A"],
        "weights": [[0.875, 0.125]],
    }


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"min_target_tokens": -1}, "options.min_target_tokens"),
        ({"min_target_tokens": 4097}, "options.min_target_tokens"),
        ({"min_target_tokens": 2.0}, "options.min_target_tokens"),
        ({"min_target_tokens": True}, "options.min_target_tokens"),
        ({"min_target_tokens": None}, "options.min_target_tokens"),
        ({"min_target_tokens": 10**40}, "options.min_target_tokens"),
        ({"min_target_ratio": -0.1}, "options.min_target_ratio"),
        ({"min_target_ratio": 11}, "options.min_target_ratio"),
        ({"min_target_ratio": "1"}, "options.min_target_ratio"),
        ({"no_repeat_ngram_size": 65}, "options.no_repeat_ngram_size"),
        ({"repetition_penalty": 0.99}, "options.repetition_penalty"),
        ({"repetition_penalty": 1e308}, "options.repetition_penalty"),
        ({"forbidden": "word"}, "options.forbidden"),
        ({"forbidden": [3]}, "options.forbidden.0"),
        ({"forbidden": [["a"]]}, "options.forbidden.0"),
        ({"forbidden": None}, "options.forbidden"),
        ({"forbidden": ["a"] * 101}, "options.forbidden"),
        ({"forbidden": ["a", "b" * 101]}, "options.forbidden.1"),
        ({"alignment": 1}, "options.alignment"),
        ({"alignment": "true"}, "options.alignment"),
    ],
)
async def test_a_value_of_the_wrong_type_or_size_is_refused_by_name(
    client: httpx.AsyncClient, engine: FakeEngine, options: dict[str, Any], part: str
) -> None:
    error = await refused(client, {**GOOD, "options": options})
    assert error["code"] == "invalid_request"
    assert part in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["min_target_ratio", "repetition_penalty"])
async def test_numbers_that_are_none_are_refused(client: httpx.AsyncClient, name: str, value: str) -> None:
    body = json.dumps({**GOOD, "options": {name: 0.125}}).replace("0.125", value)
    response = await client.post("/v1/translate", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert f"options.{name}" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"min_target_tokens": 9, "max_target_tokens": 8}, ["min_target_tokens is 9", "is 8"]),
        ({"min_target_ratio": 2, "max_target_ratio": 1.5}, ["min_target_ratio is 2", "is 1.5"]),
        ({"forbidden": ["fine", " "]}, ["forbidden[1] is blank"]),
        ({"forbidden": ["secret\u0000"]}, ["forbidden[0] holds a control character"]),
        ({"forbidden": ["secret\n"]}, ["forbidden[0] holds a control character"]),
    ],
)
async def test_contradictions_and_unusable_phrases_are_invalid_options(
    client: httpx.AsyncClient, options: dict[str, Any], parts: list[str]
) -> None:
    error = await refused(client, {**GOOD, "options": options})
    assert error["code"] == "invalid_option"
    assert all(part in error["message"] for part in parts)
    assert "secret" not in error["message"]


@pytest.mark.parametrize("prefixes", [["Bom"], ["", "", ""]])
async def test_prefixes_are_as_many_as_texts(client: httpx.AsyncClient, prefixes: list[str]) -> None:
    error = await refused(client, {**GOOD, "target_prefixes": prefixes})
    assert f"target_prefixes has {len(prefixes)} items and texts has 2" in error["message"]
    assert "Bom" not in error["message"]


@pytest.mark.parametrize("prefixes", [None, "Bom", [1, 2], {"0": "Bom"}, [None, None]])
async def test_prefixes_are_a_list_of_strings(client: httpx.AsyncClient, prefixes: object) -> None:
    error = await refused(client, {**GOOD, "target_prefixes": prefixes})
    assert "target_prefixes" in error["message"]


async def test_half_a_surrogate_pair_is_refused(client: httpx.AsyncClient) -> None:
    body = r'{"texts": ["a"], "source": "en", "target": "pt", "options": {"forbidden": ["\ud800"]}}'
    response = await client.post("/v1/translate", content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422)


async def test_prefixes_count_among_the_characters_of_a_request(client: httpx.AsyncClient) -> None:
    body = {"texts": ["a" * 600], "source": "en", "target": "pt", "target_prefixes": ["b" * 401]}
    response = await client.post("/v1/translate", json=body)
    assert response.status_code == 413
    assert "1001 characters, the limit is 1000" in response.json()["error"]["message"]


async def test_alignment_has_a_limit_of_its_own(engine: FakeEngine) -> None:
    application = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()))
    body = {"texts": ["a" * 20_001], "source": "en", "target": "pt"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(application), base_url="http://service"
    ) as client:
        assert (await client.post("/v1/translate", json=body)).status_code == 200
        response = await client.post("/v1/translate", json={**body, "options": {"alignment": True}})
    assert response.status_code == 413
    assert "20001 characters, the limit with alignment is 20000" in response.json()["error"]["message"]


async def test_the_schema_describes_the_new_fields(application: FastAPI) -> None:
    schemas = application.openapi()["components"]["schemas"]
    assert set(WANTED) <= schemas["OptionsBody"]["properties"].keys()
    assert "byte for byte" in schemas["TranslateBody"]["properties"]["target_prefixes"]["description"]
    assert "forbidden" in schemas["SegmentAnswer"]["properties"]["finish_reason"]["description"]
