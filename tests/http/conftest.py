from collections.abc import AsyncIterator

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from app.api import ApiOptions, create_app
from app.observability import Metrics


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def application(engine: FakeEngine) -> FastAPI:
    options = ApiOptions(max_body_bytes=4096, max_texts=4, max_text_characters=1000)
    return create_app(engine, options, metrics=Metrics(CollectorRegistry()))


@pytest.fixture
async def client(application: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        yield client
