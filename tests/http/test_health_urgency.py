"""Deadlines and priorities as HTTP carries them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from app.errors import DeadlineExceeded
from app.runtime.request import Priority

BODIES: dict[str, dict[str, Any]] = {
    "/v1/translate": {"texts": ["good morning"], "source": "en", "target": "pt"},
    "/translate": {"q": "good morning", "source": "en", "target": "pt"},
}
PATHS = pytest.mark.parametrize("path", list(BODIES))


@PATHS
async def test_the_headers_reach_the_engine_and_do_not_outlive_their_request(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    for headers in ({}, {"X-Request-Timeout": "2.5", "X-Priority": "Bulk"}, {"x-request-timeout": "30"}, {}):
        assert (await client.post(path, json=BODIES[path], headers=headers)).status_code == 200
    assert [(asked.timeout_s, asked.priority) for asked in engine.requests] == [
        (None, Priority.INTERACTIVE),
        (2.5, Priority.BULK),
        (30.0, Priority.INTERACTIVE),
        (None, Priority.INTERACTIVE),
    ]


@PATHS
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("X-Request-Timeout", value) for value in ("", "0", "-1", "nan", "1e3", "86401", "9" * 40, "soon")),
        *(("X-Priority", value) for value in ("", "urgent", "x" * 500)),
    ],
)
async def test_a_header_that_makes_no_sense_is_refused_by_its_name_and_not_repeated(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, name: str, value: str
) -> None:
    answer = await client.post(path, json=BODIES[path], headers={name: value})
    assert answer.status_code == (422 if path.startswith("/v1") else 400)
    assert name in answer.text
    assert len(value) < 4 or value not in answer.text
    assert engine.requests == []


@PATHS
async def test_a_deadline_that_passed_is_504_and_not_to_be_repeated_blindly(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    engine.fault = DeadlineExceeded("the request was not translated within the 2 s allowed for it")
    answer = await client.post(path, json=BODIES[path])
    assert answer.status_code == 504
    assert "2 s" in answer.text
    assert "retry-after" not in answer.headers
    if path.startswith("/v1"):
        error = json.loads(answer.text)["error"]
        assert (error["code"], error["retryable"]) == ("deadline_exceeded", False)


async def test_the_description_names_the_headers_and_the_answer_where_work_may_wait(
    client: httpx.AsyncClient,
) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    for path in BODIES:
        operation = paths[path]["post"]
        assert {"X-Request-Timeout", "X-Priority"} <= {field["name"] for field in operation["parameters"]}
        assert operation["responses"]["504"]["content"] == operation["responses"]["503"]["content"]
    assert "504" not in paths["/livez"]["get"]["responses"]
