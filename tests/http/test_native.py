import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import (
    BundleCorrupt,
    DragomanError,
    InvalidOption,
    QueueFull,
    RequestTooLarge,
    ShuttingDown,
    UnsupportedPair,
    WorkerFailed,
)

GOOD: dict[str, Any] = {"texts": ["good morning"], "source": "en", "target": "pt"}
JSON = {"Content-Type": "application/json"}


def assert_error(response: httpx.Response, status: int, code: str, *, retryable: bool = False) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"code", "message", "retryable"}
    assert error["code"] == code
    assert error["retryable"] is retryable
    return str(error["message"])


async def test_a_translation_has_all_its_facts(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/translate", json=GOOD)
    assert response.status_code == 200
    assert response.json() == {
        "texts": [
            {
                "text": "GOOD MORNING",
                "segments": [
                    {
                        "source": "good morning",
                        "target": "GOOD MORNING",
                        "num_source_tokens": 3,
                        "num_target_tokens": 4,
                        "score": -0.25,
                        "finish_reason": "eos",
                        "alternatives": [],
                        "alignment": None,
                    }
                ],
                "warnings": [],
                "alternatives": [],
            }
        ],
        "source": "en",
        "target": "pt",
        "model": "en-pt",
        "timings": {"total_s": 0.3, "queue_s": 0.1, "decode_s": 0.2},
    }


async def test_warnings_are_part_of_the_answer(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/translate", json={**GOOD, "texts": ["snow ☃"]})
    assert [warning["code"] for warning in response.json()["texts"][0]["warnings"]] == ["unknown_characters"]


async def test_options_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    options = {"max_target_tokens": 9, "max_target_ratio": 1.5}
    assert (await client.post("/v1/translate", json={**GOOD, "options": options})).status_code == 200
    assert engine.requests[0].options.max_target_tokens == 9
    assert engine.requests[0].options.max_target_ratio == 1.5


@pytest.mark.parametrize("texts", [[], [""], ["a\x00b"], [" \n ", "x"], ["\U0001f600 e\u0301"]])
async def test_odd_texts_are_translated_as_they_are(client: httpx.AsyncClient, texts: list[str]) -> None:
    response = await client.post("/v1/translate", json={**GOOD, "texts": texts})
    assert response.status_code == 200
    assert [text["text"] for text in response.json()["texts"]] == [text.upper() for text in texts]


@pytest.mark.parametrize(
    ("source", "target"), [("EN", "PT"), ("en-GB", "pt-BR"), ("en_US", "pb"), ("en", "pt-pt")]
)
async def test_codes_match_in_any_case_by_alias_and_by_base(
    client: httpx.AsyncClient, engine: FakeEngine, source: str, target: str
) -> None:
    response = await client.post("/v1/translate", json={**GOOD, "source": source, "target": target})
    assert response.status_code == 200
    assert (engine.requests[0].source, engine.requests[0].target) == ("en", "pt")
    assert (response.json()["source"], response.json()["target"]) == ("en", "pt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b'{"texts": ["a"]',
        b'\xff\xfe{"texts": []}',
        b'{"texts": ["\xff"], "source": "en", "target": "pt"}',
        b'{"texts": ["\\ud800"], "source": "en", "target": "pt"}',
        b'{"texts": ["\xed\xa0\x80"], "source": "en", "target": "pt"}',
        b'{"texts": ' + b"[" * 1500 + b"]" * 1500 + b"}",
        b"[" * 4000,
    ],
)
async def test_a_body_that_is_no_json_in_utf8_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    response = await client.post("/v1/translate", content=body, headers=JSON)
    assert_error(response, 400, "malformed_body")


@pytest.mark.parametrize(
    "change",
    [
        {"texts": None},
        {"texts": "good morning"},
        {"texts": [1]},
        {"texts": [None]},
        {"texts": {"0": "a"}},
        {"source": 3},
        {"source": None},
        {"target": True},
        {"options": None},
        {"options": []},
        {"options": {"max_target_tokens": "5"}},
        {"options": {"max_target_tokens": 5.0}},
        {"options": {"max_target_tokens": True}},
        {"options": {"max_target_tokens": 0}},
        {"options": {"max_target_tokens": 10**30}},
        {"options": {"max_target_ratio": 99}},
        {"options": {"beams": 4}},
        {"sourc": "en"},
    ],
)
async def test_a_wrong_type_or_unknown_field_is_refused(
    client: httpx.AsyncClient, engine: FakeEngine, change: dict[str, object]
) -> None:
    response = await client.post("/v1/translate", json={**GOOD, **change})
    assert_error(response, 422, "invalid_request")
    assert engine.requests == []


@pytest.mark.parametrize("field", ["texts", "source", "target"])
async def test_a_missing_field_is_named(client: httpx.AsyncClient, field: str) -> None:
    response = await client.post("/v1/translate", json={k: v for k, v in GOOD.items() if k != field})
    assert field in assert_error(response, 422, "invalid_request")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_are_none_are_refused(client: httpx.AsyncClient, value: str) -> None:
    body = json.dumps({**GOOD, "options": {"max_target_ratio": 0.5}}).replace("0.5", value)
    response = await client.post("/v1/translate", content=body.encode(), headers=JSON)
    assert_error(response, 422, "invalid_request")


@pytest.mark.parametrize("body", ["[]", "null", "3", '"text"', "true"])
async def test_json_that_is_no_object_is_refused(client: httpx.AsyncClient, body: str) -> None:
    response = await client.post("/v1/translate", content=body.encode(), headers=JSON)
    assert_error(response, 422, "invalid_request")


async def test_errors_never_repeat_the_text(client: httpx.AsyncClient) -> None:
    secret = "my secret diary"
    for body in (
        {**GOOD, "texts": secret},
        {**GOOD, "texts": [[secret]]},
        {**GOOD, "source": secret},
        {**GOOD, secret: 1},
        {**GOOD, "options": {"max_target_tokens": secret}},
        secret,
    ):
        response = await client.post("/v1/translate", json=body)
        assert response.status_code == 422
        assert "secret" not in response.text


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
async def test_another_content_type_is_refused(client: httpx.AsyncClient, content_type: str) -> None:
    response = await client.post(
        "/v1/translate", content=json.dumps(GOOD).encode(), headers={"Content-Type": content_type}
    )
    assert_error(response, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
async def test_json_by_any_of_its_names_is_read(client: httpx.AsyncClient, content_type: str) -> None:
    response = await client.post(
        "/v1/translate", content=json.dumps(GOOD).encode(), headers={"Content-Type": content_type}
    )
    assert response.status_code == 200


async def test_an_unavailable_pair_names_the_available_ones(client: httpx.AsyncClient) -> None:
    for source, target in (("en", "xx"), ("xx", "pt"), ("en", "en")):
        response = await client.post("/v1/translate", json={**GOOD, "source": source, "target": target})
        message = assert_error(response, 422, "unsupported_pair")
        assert "en to pt, pt to en" in message


async def test_limits_on_texts_and_characters_name_value_and_limit(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/translate", json={**GOOD, "texts": ["a"] * 5})
    message = assert_error(response, 413, "request_too_large")
    assert "5" in message
    assert "4" in message
    response = await client.post("/v1/translate", json={**GOOD, "texts": ["a" * 600, "b" * 401]})
    assert "1001" in assert_error(response, 413, "request_too_large")
    response = await client.post("/v1/translate", json={**GOOD, "texts": ["a" * 600, "b" * 400]})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("fault", "status", "retryable"),
    [
        (InvalidOption("max_target_tokens is 9; this model has 8"), 422, False),
        (UnsupportedPair("no"), 422, False),
        (RequestTooLarge("no"), 413, False),
        (QueueFull("9 tokens wait, the limit is 8; try again", retry_after_s=2.3), 429, True),
        (ShuttingDown("stopping; try another instance"), 503, True),
        (WorkerFailed("the step failed; try again"), 503, True),
        (BundleCorrupt("a file is gone"), 500, False),
        (DragomanError("odd"), 500, False),
    ],
)
async def test_each_error_has_its_status(
    client: httpx.AsyncClient, engine: FakeEngine, fault: DragomanError, status: int, retryable: bool
) -> None:
    engine.fault = fault
    response = await client.post("/v1/translate", json=GOOD)
    assert assert_error(response, status, fault.code, retryable=retryable) == fault.message
    assert ("retry-after" in response.headers) is retryable


async def test_a_full_queue_says_when_to_come_back_in_whole_seconds_rounded_up(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    for estimate_s, header in ((2.3, "3"), (0.01, "1"), (60.0, "60")):
        engine.fault = QueueFull("full", retry_after_s=estimate_s)
        assert (await client.post("/v1/translate", json=GOOD)).headers["retry-after"] == header


async def test_models_lists_every_pair(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models")).json() == {
        "models": [
            {"id": "en-pt", "source": "en", "target": "pt"},
            {"id": "pt-en", "source": "pt", "target": "en"},
        ]
    }


async def test_unknown_paths_and_methods_are_answered_in_the_native_shape(client: httpx.AsyncClient) -> None:
    assert_error(await client.get("/v1/nothing"), 404, "not_found")
    response = await client.get("/v1/translate")
    assert_error(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "texts": json_values | st.lists(st.text(max_size=5), max_size=5),
        "source": json_values | st.sampled_from(["en", "pt", "EN", "xx"]),
        "target": json_values | st.sampled_from(["en", "pt", "pt-BR"]),
        "options": json_values | st.fixed_dictionaries({}, optional={"max_target_tokens": json_values}),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies | json_values)
async def test_any_json_gets_an_answer_or_a_named_error(client: httpx.AsyncClient, body: object) -> None:
    for path in ("/v1/translate", "/translate"):
        response = await client.post(path, content=json.dumps(body).encode(), headers=JSON)
        assert response.status_code in {200, 400, 413, 422}
        assert ("error" in response.json()) is (response.status_code != 200)


async def test_detection_is_refused_with_the_codes_to_choose_from(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/translate", json={"texts": ["a"], "source": "AUTO", "target": "pt"})
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == "unsupported_pair"
    assert answer.json()["error"]["message"] == (
        "auto is not supported: there is no language detection here; name the source as one of en, pt"
    )


async def test_beams_and_their_hypotheses_are_asked_for_and_answered(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    wanted = {
        "beam_size": 5,
        "num_hypotheses": 3,
        "length_penalty": 0.6,
        "normalisation": "gnmt",
        "patience": 2.0,
    }
    response = await client.post("/v1/translate", json={**GOOD, "options": wanted})
    assert response.status_code == 200
    (text,) = response.json()["texts"]
    assert text["segments"][0]["alternatives"] == [
        {"target": "good morning 1", "score": -0.5},
        {"target": "good morning 2", "score": -1.0},
    ]
    assert text["alternatives"] == ["good morning 1", "good morning 2"]
    options = engine.requests[-1].options
    assert {name: getattr(options, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 0},
        {"beam_size": 17},
        {"beam_size": 4, "num_hypotheses": 5},
        {"beam_size": 2.0},
        {"length_penalty": -0.1},
        {"normalisation": "median"},
        {"patience": 2.0},
    ],
)
async def test_options_that_no_search_can_honour_are_refused(
    client: httpx.AsyncClient, options: dict[str, object]
) -> None:
    response = await client.post("/v1/translate", json={**GOOD, "options": options})
    assert response.status_code == 422
    assert response.json()["error"]["retryable"] is False
