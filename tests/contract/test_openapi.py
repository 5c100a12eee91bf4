"""The API does what its own description says: schemathesis reads the one and tries the other."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
import structlog
from fake_engine import FakeEngine
from hypothesis import HealthCheck, settings
from prometheus_client import CollectorRegistry
from schemathesis.checks import negative_data_rejection, not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.generation import GenerationMode
from schemathesis.openapi import from_asgi

from app.api import ApiOptions, create_app
from app.errors import DeadlineExceeded, QueueFull, ShuttingDown, WorkerFailed
from app.observability import Metrics
from app.runtime.reload import BundleChange, Change, ReloadReport

NUM_EXAMPLES = 25
"""Of each operation, on top of those that try every bound and every type once."""
UNKNOWN_HEADER = "x-schemathesis-unknown-property"
INTEGERS = (
    "max_target_tokens",
    "min_target_tokens",
    "beam_size",
    "num_hypotheses",
    "no_repeat_ngram_size",
    "alternatives",
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/translate": {"texts": ["good morning", "☃"], "source": "en", "target": "pt"},
    "/translate": {"q": ["good morning", "☃"], "source": "en", "target": "pt"},
}
FAULTS = [
    (429, QueueFull("the queue is full", retry_after_s=2.5)),
    (500, RuntimeError("a fault of ours")),
    (503, ShuttingDown("the service is stopping; try another instance")),
    (503, WorkerFailed("the step that held this request failed; repeat it")),
    (504, DeadlineExceeded("the request was not translated within the 2 s allowed for it")),
]


class StayingEngine(FakeEngine):
    """Goes on when the application's lifespan ends and begins anew, as schemathesis' clients have it."""

    def start(self) -> None:
        self.was_started = True

    async def stop(self, *, drain_s: float) -> bool:
        return True


async def reload() -> ReloadReport:
    return ReloadReport((BundleChange("dragoman-en-pt", Change.LOADED, 0.5),), 0.75)


engine = StayingEngine()
app = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()), reload=reload)
api = from_asgi(
    "/openapi.json",
    app,
    config=SchemathesisConfig.from_dict(
        {"generation": {"deterministic": True, "max-examples": NUM_EXAMPLES, "database": "none"}}
    ),
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Some thousand access lines would hide what failed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@api.parametrize()
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_does_what_its_description_says(case: schemathesis.Case[Any]) -> None:
    # All of schemathesis' checks, with one exception: HTTP has everybody ignore headers they do not know.
    excluded = [negative_data_rejection] if UNKNOWN_HEADER in case.headers else []
    if case.meta is not None and case.meta.generation.mode is GenerationMode.POSITIVE:
        case.body = made_consistent(case.body)
        if case.media_type == "multipart/form-data" and isinstance(case.body, dict):
            # schemathesis does not escape names: name="x\" is a quoted string that never ends.
            case.body = {name: value for name, value in case.body.items() if "\\" not in name}
    case.call_and_validate(excluded_checks=excluded)


def made_consistent(body: Any) -> Any:
    """A body that is right in each of its fields, made right as a whole.

    What is changed is what JSON Schema cannot say and the descriptions do: which pairs are loaded, that one
    field limits another, and that 2.0 is no integer (which this API takes literally).
    """
    if not isinstance(body, dict) or "source" not in body:
        return body
    body = with_integers({**body, "source": "en", "target": "pt"})
    if "target_prefixes" in body:
        num_texts = len(body["texts"])
        body["target_prefixes"] = [*body["target_prefixes"], *[""] * num_texts][:num_texts]
    if "options" in body:
        options = body["options"] = with_integers(body["options"])
        beam_size = options.get("beam_size", 1)
        if "num_hypotheses" in options:
            options["num_hypotheses"] = min(options["num_hypotheses"], beam_size)
        if beam_size == 1:
            options.pop("patience", None)
        for unit in ("tokens", "ratio"):
            if (most := options.get(f"max_target_{unit}")) is not None:
                options[f"min_target_{unit}"] = min(most, options.get(f"min_target_{unit}", 0))
    return body


def with_integers(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: int(value) if name in INTEGERS and isinstance(value, float) else value
        for name, value in fields.items()
    }


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_with_a_warning_is_described(path: str) -> None:
    case = api[path]["POST"].Case(body=BODIES[path], media_type="application/json")
    assert case.call_and_validate().status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("status", "fault"), FAULTS)
def test_what_a_translation_answers_when_it_fails_is_described(
    monkeypatch: pytest.MonkeyPatch, path: str, status: int, fault: Exception
) -> None:
    monkeypatch.setattr(engine, "fault", fault)
    case = api[path]["POST"].Case(body=BODIES[path], media_type="application/json")
    answer = case.call()
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    case.validate_response(answer, excluded_checks=[not_a_server_error])


@pytest.mark.parametrize("path", ["/readyz", "/health", "/v2/health/ready", "/startupz"])
def test_what_a_probe_answers_when_it_fails_is_described(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(engine, "started", False)
    case = api[path]["GET"].Case()
    answer = case.call()
    assert answer.status_code == 503
    case.validate_response(answer, excluded_checks=[not_a_server_error])


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/livez", "GET, HEAD"), ("/languages", "GET"), ("/v1/translate", "POST"), ("/no", None)],
)
async def test_a_refused_method_is_told_all_that_the_path_takes(path: str, allow: str | None) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        answer = await client.put(path)
    assert answer.status_code == (404 if allow is None else 405)
    assert answer.headers.get("allow") == allow


@pytest.mark.parametrize("path", BODIES)
async def test_a_deadline_is_a_number_of_its_description(path: str) -> None:
    (schema,) = (
        parameter["schema"]
        for parameter in api.raw_schema["paths"][path]["post"]["parameters"]
        if parameter["name"] == "X-Request-Timeout"
    )
    least, most = schema["minimum"], schema["maximum"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        for seconds in (least, most, 0.1 + 0.2, math.nextafter(least, 1), math.nextafter(most, 0)):
            headers = {"X-Request-Timeout": repr(seconds)}
            assert (await client.post(path, json=BODIES[path], headers=headers)).status_code == 200
        for seconds in (math.nextafter(least, 0), math.nextafter(most, math.inf), least / 1000):
            headers = {"X-Request-Timeout": f"{seconds:.20f}"}
            assert (await client.post(path, json=BODIES[path], headers=headers)).status_code in (400, 422)
