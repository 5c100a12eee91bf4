"""Ask a running service everything a client, an orchestrator and Prometheus ask; exit code 0 if all is well.

    python docker/smoke_test.py http://127.0.0.1:8000

Needs Python 3.11 and nothing else, so that it runs where the service is deployed. With ``--stop COMMAND``
it also stops the service while a long request is in flight, and demands the whole answer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

_REQUEST_TIMEOUT_S = 120.0
_POLL_S = 0.05
_SENTENCE = "Train {} to the coast leaves early in the morning, and nobody knows when it comes back."
_NUM_LONG_TEXTS = 16
_NUM_SENTENCES_OF_A_TEXT = 24


class CheckFailed(Exception):
    """The service answered something else than it should; the message says what."""


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    def text(self) -> str:
        """The body as text."""
        return self.body.decode("utf-8")

    def json(self) -> object:
        """The body as JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise CheckFailed(f"status {self.status}, and the body is no JSON: {self.body[:80]!r}") from None


class Client:
    """One connection per request to the service at a base URL."""

    def __init__(self, base_url: str) -> None:
        """Address `base_url`, such as ``http://127.0.0.1:8000``."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise SystemExit(f"{base_url} is not a base URL; write one such as http://127.0.0.1:8000")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path.rstrip("/")

    def get(self, path: str) -> Reply:
        """GET a path."""
        return self._ask("GET", path, None, {})

    def post(self, path: str, document: object) -> Reply:
        """POST a JSON document."""
        return self.post_raw(path, json.dumps(document).encode(), content_type="application/json")

    def post_raw(self, path: str, body: bytes, *, content_type: str) -> Reply:
        """POST bytes."""
        return self._ask("POST", path, body, {"Content-Type": content_type})

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Reply:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_REQUEST_TIMEOUT_S)
        try:
            connection.request(method, self._prefix + path, body, headers)
            response = connection.getresponse()
            answer = response.read()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, answer)
        finally:
            connection.close()


def expect(found: object, wanted: object, what: str) -> None:
    """Fail unless two values are equal."""
    if found != wanted:
        raise CheckFailed(f"{what} is {found!r}, expected {wanted!r}")


def wait_until_ready(client: Client, *, deadline_s: float) -> str:
    """Ask /readyz until it is 200.

    Raises:
        CheckFailed: it was not before the deadline.
    """
    start_s = time.monotonic()
    said = "nothing"
    while (waited_s := time.monotonic() - start_s) < deadline_s:
        try:
            reply = client.get("/readyz")
            if reply.status == http.client.OK:
                return f"after {waited_s:.1f} s"
            said = f"status {reply.status}"
        except (OSError, http.client.HTTPException) as error:
            said = type(error).__name__
        time.sleep(_POLL_S)
    raise CheckFailed(f"not ready after {deadline_s:g} s; last answer: {said}. Read the service's log")


def check_probe(client: Client, path: str) -> str:
    """A probe says ok."""
    reply = client.get(path)
    expect(reply.status, 200, "status")
    expect(reply.json(), {"status": "ok"}, "body")
    return "ok"


def check_models(client: Client) -> str:
    """Both shipped directions are loaded."""
    reply = client.get("/v1/models")
    expect(reply.status, 200, "status")
    models = _dicts(_dict(reply.json()).get("models"))
    pairs = {(model.get("source"), model.get("target")) for model in models}
    if missing := {("en", "pt"), ("pt", "en")} - pairs:
        raise CheckFailed(f"no model for {sorted(missing)}")
    return ", ".join(str(model.get("id")) for model in models)


def check_languages(client: Client) -> str:
    """Each of the two languages has the other one as a target."""
    reply = client.get("/languages")
    expect(reply.status, 200, "status")
    targets_of = {entry.get("code"): entry.get("targets") for entry in _dicts(reply.json())}
    for source, target in (("en", "pt"), ("pt", "en")):
        targets = targets_of.get(source)
        if not isinstance(targets, list) or target not in targets:
            raise CheckFailed(f"{source} has targets {targets!r}, expected {target} among them")
    return f"{len(targets_of)} languages"


def check_native(client: Client, source: str, target: str, text: str, pattern: str) -> str:
    """POST /v1/translate of two texts; the first must match, the second must keep its empty line."""
    texts = [text, f"{text}\n\n{text}"]
    reply = client.post("/v1/translate", {"texts": texts, "source": source, "target": target})
    expect(reply.status, 200, "status")
    answers = [str(answer.get("text")) for answer in _dicts(_dict(reply.json()).get("texts"))]
    expect(len(answers), len(texts), "number of texts")
    _match(answers[0], pattern)
    expect(answers[1], f"{answers[0]}\n\n{answers[0]}", "text of two paragraphs")
    return answers[0]


def check_libretranslate(client: Client, source: str, target: str, text: str, pattern: str) -> str:
    """POST /translate, as JSON and as a form, gives the same."""
    reply = client.post("/translate", {"q": text, "source": source, "target": target})
    expect(reply.status, 200, "status")
    translated = str(_dict(reply.json()).get("translatedText"))
    _match(translated, pattern)
    form = f"q={text.replace(' ', '+')}&source={source}&target={target}".encode()
    as_form = client.post_raw("/translate", form, content_type="application/x-www-form-urlencoded")
    expect(as_form.status, 200, "status of a form")
    expect(_dict(as_form.json()).get("translatedText"), translated, "translation of a form")
    return translated


def check_native_refusal(client: Client) -> str:
    """A pair nobody translates is refused with a code a program can read."""
    reply = client.post("/v1/translate", {"texts": ["x"], "source": "en", "target": "xx"})
    expect(reply.status, 422, "status")
    error = _dict(_dict(reply.json()).get("error"))
    expect(error.get("code"), "unsupported_pair", "error code")
    expect(error.get("retryable"), False, "retryable")
    return f"422 {error.get('code')}"


def check_malformed(client: Client) -> str:
    """A body that is no JSON is refused, not fatal."""
    reply = client.post_raw("/v1/translate", b"{", content_type="application/json")
    expect(reply.status, 400, "status")
    return f"400 {_dict(_dict(reply.json()).get('error')).get('code')}"


def check_libretranslate_refusal(client: Client) -> str:
    """LibreTranslate's clients get their shape of an error."""
    reply = client.post("/translate", {"source": "en", "target": "pt"})
    expect(reply.status, 400, "status")
    if not isinstance(_dict(reply.json()).get("error"), str):
        raise CheckFailed("the error is no string")
    return "400"


def check_request_id(client: Client) -> str:
    """Every answer names its request, so that a user's complaint can be found in the log."""
    request_id = client.get("/livez").headers.get("x-request-id", "")
    if not request_id:
        raise CheckFailed("there is no X-Request-ID header")
    return request_id


def check_trace(client: Client) -> str:
    """An answer names its trace, by which log lines and spans of several services are found."""
    traced = client.get("/livez").headers.get("traceresponse", "")
    if not re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", traced):
        raise CheckFailed(f"traceresponse is {traced!r}")
    return traced


def check_metrics(client: Client) -> str:
    """Prometheus' text names every request and segment that came before; run it last."""
    reply = client.get("/metrics")
    expect(reply.status, 200, "status")
    if not reply.headers.get("content-type", "").startswith("text/plain"):
        raise CheckFailed(f"content type is {reply.headers.get('content-type')!r}, expected text/plain")
    text = reply.text()
    segments = _sum_of(text, "dragoman_segments_finished_total")
    refused = _sum_of(text, "dragoman_http_request_seconds_count", 'code="422"')
    for pair in ("en-pt", "pt-en"):
        if _sum_of(text, "dragoman_requests_total", f'pair="{pair}"') < 1:
            raise CheckFailed(f"no request was counted for the pair {pair}")
    expect(_sum_of(text, "dragoman_started"), 1.0, "dragoman_started")
    if segments < 1 or refused < 1:
        raise CheckFailed(f"{segments:g} segments finished and {refused:g} requests refused; expected some")
    return f"{segments:g} segments, {_sum_of(text, 'dragoman_http_request_seconds_count'):g} requests"


def long_texts() -> list[str]:
    """Texts that take long; no sentence comes twice, because the service translates equal ones only once."""
    return [
        f"{number}. "
        + " ".join(
            _SENTENCE.format(1000 + number * _NUM_SENTENCES_OF_A_TEXT + k)
            for k in range(_NUM_SENTENCES_OF_A_TEXT)
        )
        for number in range(_NUM_LONG_TEXTS)
    ]


def check_drain(client: Client, command: str) -> str:
    """Stop the service while it translates; every text must come back and the port must close."""
    texts = long_texts()
    replies: list[tuple[float, Reply]] = []
    faults: list[Exception] = []

    def ask() -> None:
        try:
            reply = client.post("/v1/translate", {"texts": texts, "source": "en", "target": "pt"})
            replies.append((time.monotonic(), reply))
        except (OSError, http.client.HTTPException) as error:
            faults.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive() and _sum_of(client.get("/metrics").text(), "dragoman_running_requests") < 1:
        time.sleep(_POLL_S)
    stopped_s = time.monotonic()
    result = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    ended_s = time.monotonic()
    asking.join()
    if faults:
        raise CheckFailed(f"the request in flight was lost: {faults[0]!r}")
    answered_s, reply = replies[0]
    if answered_s < stopped_s:
        raise CheckFailed("the request was answered before the stop, so this proves nothing; send more text")
    expect(result.returncode, 0, f"exit code of the stop command ({result.stderr.strip()})")
    expect(reply.status, 200, "status of the request in flight")
    answers = [str(answer.get("text")) for answer in _dicts(_dict(reply.json()).get("texts"))]
    expect(len(answers), len(texts), "number of texts")
    for number, answer in enumerate(answers):
        _match(answer, rf"^{number}\b.*\S")
    try:
        client.get("/livez")
    except (OSError, http.client.HTTPException):
        answered, ended = answered_s - stopped_s, ended_s - stopped_s
        return f"answered {answered:.1f} s after the stop began, ended after {ended:.1f} s"
    raise CheckFailed("the port still answers after the stop")


def run(checks: list[tuple[str, Callable[[], str]]]) -> bool:
    """Run the checks in order and print a row for each; True if none failed.

    The first one is the wait for readiness: if it fails, nothing else is asked.
    """
    width = max(len(name) for name, _ in checks)
    num_failed = 0
    for index, (name, check) in enumerate(checks):
        start_s = time.monotonic()
        try:
            verdict, detail = "ok", check()
        except CheckFailed as error:
            verdict, detail = "FAILED", str(error)
        except (OSError, http.client.HTTPException) as error:
            verdict, detail = "FAILED", f"no answer: {error!r}"
        num_failed += verdict == "FAILED"
        print(
            f"{name:<{width}}  {verdict:<6}  {(time.monotonic() - start_s) * 1000:8.0f} ms  {detail}",
            flush=True,
        )
        if verdict == "FAILED" and index == 0:
            break
    print(f"{len(checks)} checks, {num_failed} failed")
    return num_failed == 0


def main() -> int:
    """Parse the command line and check."""
    parser = argparse.ArgumentParser(description="Check a running service from outside.")
    parser.add_argument("base_url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--wait-s", type=float, default=60.0, help="Seconds to wait for readiness.")
    parser.add_argument(
        "--stop", metavar="COMMAND", help="Only check that COMMAND stops it and loses nothing."
    )
    arguments = parser.parse_args()
    client = Client(arguments.base_url)
    ready: tuple[str, Callable[[], str]] = (
        "ready",
        lambda: wait_until_ready(client, deadline_s=arguments.wait_s),
    )
    if arguments.stop is not None:
        return 0 if run([ready, ("stop in flight", lambda: check_drain(client, arguments.stop))]) else 1
    english, portuguese = "Good morning, my friends.", "Bom dia, meus amigos."
    to_english, to_portuguese = r"(?i)good morning.*friends", r"(?i)bom dia.*amigos"
    checks: list[tuple[str, Callable[[], str]]] = [
        ready,
        ("GET /livez", lambda: check_probe(client, "/livez")),
        ("GET /startupz", lambda: check_probe(client, "/startupz")),
        ("GET /readyz", lambda: check_probe(client, "/readyz")),
        ("GET /health", lambda: check_probe(client, "/health")),
        ("GET /v1/models", lambda: check_models(client)),
        ("GET /languages", lambda: check_languages(client)),
        ("POST /v1/translate en pt", lambda: check_native(client, "en", "pt", english, to_portuguese)),
        ("POST /v1/translate pt en", lambda: check_native(client, "pt", "en", portuguese, to_english)),
        ("POST /translate en pt", lambda: check_libretranslate(client, "en", "pt", english, to_portuguese)),
        ("POST /translate pt en", lambda: check_libretranslate(client, "pt", "en", portuguese, to_english)),
        ("unknown pair", lambda: check_native_refusal(client)),
        ("malformed body", lambda: check_malformed(client)),
        ("missing text", lambda: check_libretranslate_refusal(client)),
        ("request id", lambda: check_request_id(client)),
        ("trace id", lambda: check_trace(client)),
        ("GET /metrics", lambda: check_metrics(client)),
    ]
    return 0 if run(checks) else 1


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise CheckFailed(f"expected a JSON object, found {type(value).__name__}")
    return value


def _dicts(value: object) -> list[dict[str, object]]:
    if not isinstance(value, list):
        raise CheckFailed(f"expected a JSON array, found {type(value).__name__}")
    return [_dict(item) for item in value]


def _match(text: str, pattern: str) -> None:
    if not re.search(pattern, text):
        raise CheckFailed(f"translation is {text!r}, expected it to match {pattern}")


def _sum_of(exposition: str, metric: str, label: str = "") -> float:
    """Sum of a metric's samples, over those that carry `label`."""
    lines = re.findall(rf"^{metric}(\{{[^}}]*\}})? (\S+)$", exposition, flags=re.MULTILINE)
    return sum(float(value) for labels, value in lines if label in labels)


if __name__ == "__main__":
    sys.exit(main())
