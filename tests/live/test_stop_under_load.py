from __future__ import annotations

import asyncio
import os

import httpx
import pytest
from service_process import Start
from stop_under_load import ANSWERED, LOST, NOT_SENT, REFUSED, WRONG, Load

pytestmark = pytest.mark.live

NUM_STOPS = int(os.environ.get("SOAK_STOPS", "2"))
NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "150"))
TEXTS = [f"The {number} boats left the harbour before the storm." for number in range(2, 10)]


@pytest.mark.parametrize("stop", range(NUM_STOPS))
def test_a_service_that_is_stopped_under_load_loses_no_request(
    start: Start, http: httpx.Client, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kept translations would be answered before anything could be stopped.
    monkeypatch.setenv("DRAGOMAN_MAX_CACHE_BYTES", "0")
    service = start("-m", "app", "serve", "--port", "0", "--workers", "1")
    url = service.url
    body = {"source": "en", "target": "pt"}
    expected = {
        text: http.post(f"{url}/v1/translate", json={**body, "texts": [text]}).json()["texts"][0]["text"]
        for text in TEXTS
    }
    load = Load(int(url.rpartition(":")[2]), expected, num_clients=24)
    # Each stop comes at another moment.
    at = NUM_REQUESTS * (1 + stop % 8) // 10
    asyncio.run(load.run(NUM_REQUESTS, at=at, stop=service.signal))
    assert service.exit_code() == 0
    assert load.outcomes.total() == NUM_REQUESTS
    assert (load.outcomes[LOST], load.outcomes[WRONG]) == (0, 0), load.details
    assert load.outcomes[ANSWERED] >= at - load.outcomes[REFUSED] - load.outcomes[NOT_SENT]
    assert load.outcomes[ANSWERED] > 0
    assert load.outcomes[REFUSED] + load.outcomes[NOT_SENT] > 0, "the load did not outlast the service"
    assert [line["finished"] for line in service.lines if line["event"] == "drained"] == [True]
    assert "raceback" not in service.log_text()
