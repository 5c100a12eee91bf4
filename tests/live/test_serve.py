import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from service_process import WAIT_S, Service, Start

pytestmark = pytest.mark.live

FAKE = str(Path(__file__).parent / "fake_service.py")
GOOD = {"texts": ["good morning"], "source": "en", "target": "pt"}


def slow_service(start: Start, *, work: str, drain_s: float) -> Service:
    return start(FAKE, work, "--port", "0", "--drain-s", str(drain_s))


def running_requests(http: httpx.Client, url: str) -> float:
    text = http.get(f"{url}/metrics").text
    return float(
        next(line for line in text.splitlines() if line.startswith("dragoman_running_requests ")).split()[1]
    )


def ask(pool: ThreadPoolExecutor, url: str, count: int) -> list[Future[httpx.Response]]:
    return [pool.submit(httpx.post, f"{url}/v1/translate", json=GOOD, timeout=60) for _ in range(count)]


def test_sigterm_turns_readiness_red_finishes_admitted_work_and_exits_0(
    start: Start, http: httpx.Client
) -> None:
    service = slow_service(start, work="drain+2", drain_s=20)
    url = service.url
    assert http.get(f"{url}/readyz").status_code == 200
    with ThreadPoolExecutor(20) as pool:
        answers = ask(pool, url, 20)
        service.wait_until(lambda: running_requests(http, url) == 20, "20 requests to be admitted")
        service.signal()
        service.wait_until(lambda: http.get(f"{url}/readyz").status_code == 503, "readiness to turn red")
        assert http.get(f"{url}/livez").status_code == 200
        refused = http.post(f"{url}/v1/translate", json=GOOD)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert "retry-after" in refused.headers
        assert [answer.result().status_code for answer in answers] == [200] * 20
    assert service.exit_code() == 0
    assert [line["finished"] for line in service.lines if line["event"] == "drained"] == [True]


def test_work_that_outlasts_the_drain_is_answered_with_an_error_not_dropped(
    start: Start, http: httpx.Client
) -> None:
    service = slow_service(start, work="60", drain_s=0.2)
    url = service.url
    with ThreadPoolExecutor(5) as pool:
        answers = ask(pool, url, 5)
        service.wait_until(lambda: running_requests(http, url) == 5, "5 requests to be admitted")
        service.signal(signal.SIGINT)
        assert {answer.result().json()["error"]["code"] for answer in answers} == {"shutting_down"}
    assert service.exit_code() == 0


def test_an_engine_beyond_repair_ends_the_process_with_a_reason_once_admitted_work_is_done(
    start: Start, http: httpx.Client
) -> None:
    service = start(FAKE, "drain+0.5", "--port", "0", "--drain-s", "20", BREAK_AFTER_S="3")
    with ThreadPoolExecutor(3) as pool:
        answers = ask(pool, service.url, 3)
        assert [answer.result().status_code for answer in answers] == [200] * 3
    assert service.exit_code() == 1
    broken = [line for line in service.lines if line["event"] == "broken"]
    assert [(line["level"], line["reason"]) for line in broken] == [
        ("critical", "decoding thread 0 died, as did the one before it")
    ]
    assert "raceback" not in service.log_text()


def test_the_shipped_models_have_started_before_they_are_ready(start: Start, http: httpx.Client) -> None:
    service = start("-m", "app", "serve", "--port", "0", "--workers", "2")
    service.wait_until(lambda: http.get(f"{service.url}/readyz").status_code == 200, "readiness")
    assert http.get(f"{service.url}/startupz").json() == {"status": "ok"}
    metrics = http.get(f"{service.url}/metrics").text
    finished = [line for line in metrics.splitlines() if line.startswith("dragoman_segments_finished_total")]
    # A canary of each model on each worker.
    assert sum(float(line.split()[-1]) for line in finished) == 4
    assert len(finished) == 2
    service.signal()
    assert service.exit_code() == 0


def test_a_second_signal_ends_it_at_once(start: Start, http: httpx.Client) -> None:
    service = slow_service(start, work="60", drain_s=60)
    url = service.url
    with ThreadPoolExecutor(1) as pool:
        answer = ask(pool, url, 1)[0]
        service.wait_until(lambda: running_requests(http, url) == 1, "a request to be admitted")
        service.signal()
        service.wait_until(lambda: http.get(f"{url}/readyz").status_code == 503, "readiness to turn red")
        service.signal()
        service.exit_code()
        assert answer.exception() is not None or answer.result().status_code == 500


def test_a_client_that_leaves_frees_its_place(start: Start, http: httpx.Client) -> None:
    service = slow_service(start, work="60", drain_s=0)
    url = service.url
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/translate", json={"q": "a", "source": "en", "target": "pt"}, timeout=0.5)
    service.wait_until(lambda: running_requests(http, url) == 0, "the work to be cancelled")
    service.wait_until(
        lambda: any(line.get("status") == 499 for line in service.lines),
        "the access line of a closed request",
    )


def test_texts_never_reach_the_log(start: Start, http: httpx.Client) -> None:
    service = start(FAKE, "0", "--port", "0", "--log-level", "debug")
    url = service.url
    http.post(f"{url}/translate?q=secret&source=en&target=pt")
    http.post(f"{url}/v1/translate", json={**GOOD, "texts": ["secret"], "secret": 1})
    http.get(f"{url}/secret")
    service.signal()
    assert service.exit_code() == 0
    assert "secret" not in service.log_text()
    assert [line["route"] for line in service.lines if line["event"] == "request"] == [
        "/translate",
        "/v1/translate",
        "unmatched",
    ]


def test_a_taken_port_ends_it_in_one_line_before_any_model_is_loaded(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        # A folder that does not exist would be the next thing to complain about.
        service = start("-m", "app", "serve", "--port", str(port), "--bundles", "/no/such")
        assert service.exit_code() == 1
    assert service.log_text() == f"dragoman: 127.0.0.1:{port} is taken; choose another with --port\n"


def test_an_idle_connection_is_kept_as_long_as_the_setting_says(start: Start) -> None:
    service = start(FAKE, "0", "--port", "0", DRAGOMAN_KEEP_ALIVE_S="1")
    with httpx.Client(base_url=service.url, limits=httpx.Limits(keepalive_expiry=60)) as client:
        stream = client.get("/livez").extensions["network_stream"]
        connection: socket.socket = stream.get_extra_info("socket")
        connection.settimeout(WAIT_S)
        began_s = time.monotonic()
        assert connection.recv(1) == b""
        assert time.monotonic() - began_s > 0.9


def test_a_misspelt_setting_ends_it_with_the_right_one(start: Start) -> None:
    service = start("-m", "app", "serve", DRAGOMAN_PROT="1")
    assert service.exit_code() == 2
    assert service.log_text() == (
        "dragoman: DRAGOMAN_PROT is not a setting; did you mean DRAGOMAN_PORT? Rename it, or unset it\n"
    )


def test_a_folder_without_bundles_ends_it_with_a_reason(start: Start, tmp_path: Path) -> None:
    service = start("-m", "app", "serve", "--bundles", str(tmp_path))
    assert service.exit_code() == 1
    assert "no bundle" in service.log_text()
    assert "Traceback" not in service.log_text()


def test_the_shipped_models_lose_nothing_when_stopped_under_load(
    start: Start, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kept translations would be answered before anything could be stopped.
    monkeypatch.setenv("DRAGOMAN_MAX_CACHE_BYTES", "0")
    service = start("-m", "app", "serve", "--port", "0", "--workers", "1")
    url = service.url
    texts = [f"The {number} boats left the harbour before the storm." for number in range(8)]
    body = {"texts": texts, "source": "en", "target": "pt"}
    alone = http.post(f"{url}/v1/translate", json=body).json()["texts"]
    assert len(alone) == 8
    assert all(text["text"].strip() for text in alone)
    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(httpx.post, f"{url}/v1/translate", json=body, timeout=60) for _ in range(48)]
        service.wait_until(lambda: running_requests(http, url) > 0, "work to be admitted")
        service.signal()
        outcomes = [_outcome(answer) for answer in answers]
    assert service.exit_code() == 0
    # Refused (503) or never connected is fine for those that came late; an admitted one is whole, and
    # each answer that the server says it gave has arrived.
    translated = [outcome for outcome in outcomes if isinstance(outcome, list)]
    answered = [
        line for line in service.lines if line.get("route") == "/v1/translate" and line["status"] == 200
    ]
    assert translated
    assert len(translated) == len(answered) - 1
    for texts_of_one in translated:
        assert [text["text"] for text in texts_of_one] == [text["text"] for text in alone]
    assert [line["finished"] for line in service.lines if line["event"] == "drained"] == [True]


def test_a_client_that_leaves_frees_the_shipped_models(start: Start, http: httpx.Client) -> None:
    # With a cache the equal sentences would be decoded once, and nothing be left to cancel.
    service = start("-m", "app", "serve", "--port", "0", "--workers", "1", DRAGOMAN_MAX_CACHE_BYTES="0")
    url = service.url
    body = {"q": "The boats left the harbour before the storm. " * 4000, "source": "en", "target": "pt"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/translate", json=body, timeout=0.5)
    service.wait_until(lambda: running_requests(http, url) == 0, "the work to be cancelled")
    text = http.get(f"{url}/metrics").text
    assert "dragoman_waiting_tokens 0.0" in text
    assert http.post(f"{url}/translate", json={**body, "q": "Yes."}).status_code == 200


def _outcome(answer: Future[httpx.Response]) -> object:
    try:
        response = answer.result()
    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
        return "refused"
    if response.status_code == 503:
        return response.json()["error"]["code"]
    assert response.status_code == 200, response.text
    return response.json()["texts"]
