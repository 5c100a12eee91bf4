"""The client against this project's own web layer, with no model behind it."""

from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.decoding.hypothesis import FinishReason
from app.errors import InvalidRequest, QueueFull
from app.observability import Metrics
from app.runtime.request import (
    PairInfo,
    SegmentResult,
    TextResult,
    Timings,
    TranslationRequest,
    TranslationResult,
)
from model.evaluation.service_system import ServiceAddress, ServiceSystem
from model.evaluation.system import Decoding, Languages
from model.evaluation.testset import TestSet

SERVICE = ServiceAddress("http://service")
TESTSET = TestSet("t", ("Hi.", "", "Two\u2028lines"), ("x", "y", "z"))


class UpperCaseEngine:
    pairs = (PairInfo("en", "pt", "en-pt"),)

    def __init__(self) -> None:
        self.num_refusals = 2
        self.beam_sizes: set[int] = set()

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        if self.num_refusals:
            self.num_refusals -= 1
            raise QueueFull("full", retry_after_s=2)
        self.beam_sizes.add(request.options.beam_size)
        texts = [
            TextResult(text.upper(), (SegmentResult(text, text.upper(), 2, 5, -0.5, FinishReason.EOS),), ())
            for text in request.texts
        ]
        return TranslationResult(tuple(texts), "en-pt", Timings(0.1, 0, 0.1))


@pytest.fixture
def transport(engine: UpperCaseEngine) -> httpx.ASGITransport:
    application = create_app(engine, ApiOptions(), metrics=Metrics(CollectorRegistry()))  # type: ignore[arg-type]
    return httpx.ASGITransport(application)


@pytest.fixture
def engine() -> UpperCaseEngine:
    return UpperCaseEngine()


async def test_the_client_speaks_the_native_dialect(
    transport: httpx.ASGITransport, engine: UpperCaseEngine
) -> None:
    waits = SimpleNamespace(seconds=[])

    async def sleep(seconds: float) -> None:
        waits.seconds.append(seconds)

    system = ServiceSystem(
        "s",
        SERVICE,
        Languages("en", "pt"),
        Decoding(4),
        sleep=sleep,
        transport=transport,
    )
    found = await system._translate(TESTSET)
    assert found.lines == ("HI.", "", "TWO\u2028LINES")
    assert engine.beam_sizes == {4}
    assert waits.seconds == [2.0, 2.0]
    assert found.speed is not None
    assert found.speed.num_target_tokens == 15


async def test_an_unknown_pair_is_told_in_the_services_words(transport: httpx.ASGITransport) -> None:
    system = ServiceSystem("s", SERVICE, Languages("en", "xx"), Decoding(), transport=transport)
    with pytest.raises(InvalidRequest, match="en to xx is not available; available are: en to pt"):
        await system._translate(TESTSET)
