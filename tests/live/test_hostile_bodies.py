"""Bodies that are no text or nested without end, on every route that takes one, over one real connection."""

from collections.abc import Callable

import httpx
import pytest
from service_process import WAIT_S, Service, Start
from test_hostile_clients import FAKE

pytestmark = pytest.mark.live
DEPTH = 100_000
JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=b"
INVALID = {
    "no first byte": b"\xff\xfe\xfd",
    "cut short": b"\xe2\x82",
    "a byte too few": b"\xc3\x28",
    "a surrogate": b"\xed\xa0\x80",
    "beyond Unicode": b"\xf4\x90\x80\x80",
    "longer than need be": b"\xc0\xaf",
}
GOOD = {
    "/translate": {"q": "a", "source": "en", "target": "pt"},
    "/v1/translate": {"texts": ["a"], "source": "en", "target": "pt"},
}
TEXT_FIELD = {"/translate": b'"q": ', "/v1/translate": b'"texts": '}
REST = b', "source": "en", "target": "pt"}'


def in_json(path: str, value: bytes) -> bytes:
    """A document with this in the place of its texts."""
    return b"{" + TEXT_FIELD.get(path, b'"unknown": ') + value + REST


def in_multipart(value: bytes) -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="q"\r\n\r\n' + value + b"\r\n--b--\r\n"


def deep(opening: bytes, closing: bytes, *, inside: bytes = b"1") -> bytes:
    return opening * DEPTH + inside + closing * DEPTH


Body = Callable[[str], bytes]
BODIES: dict[str, tuple[str, Body]] = {}
for name, invalid in INVALID.items():
    text = b'"' + invalid + b'"'
    BODIES |= {
        f"{name}, alone": (JSON, lambda _path, bad=invalid: bad),
        f"{name}, as text": (JSON, lambda path, bad=text: in_json(path, bad)),
        f"{name}, in a list": (JSON, lambda path, bad=text: in_json(path, b"[" + bad + b"]")),
        f"{name}, as a key": (JSON, lambda _path, bad=text: b"{" + bad + b": 1}"),
        f"{name}, in a form": (FORM, lambda _path, bad=invalid: b"q=" + bad + b"&source=en&target=pt"),
        f"{name}, in parts": (MULTIPART, lambda _path, bad=invalid: in_multipart(bad)),
    }
for name, (opening, closing) in {
    "lists": (b"[", b"]"),
    "objects": (b'{"a":', b"}"),
    "both": (b'[{"a":', b"}]"),
}.items():
    nested = deep(opening, closing)
    BODIES |= {
        f"{name} alone": (JSON, lambda _path, deep=nested: deep),
        f"{name} never closed": (JSON, lambda _path, deep=opening * DEPTH: deep),
        f"{name} as text": (JSON, lambda path, deep=nested: in_json(path, deep)),
        f"{name} as options": (JSON, lambda path, deep=nested: in_json(path, b'["a"], "options": ' + deep)),
        f"{name} in a form": (FORM, lambda _path, deep=nested: b"q[" + deep + b"]=a"),
    }


def post_routes(http: httpx.Client, url: str) -> list[str]:
    """Every route with POST that the service says it has."""
    paths = http.get(f"{url}/openapi.json").json()["paths"]
    return sorted(path for path, methods in paths.items() if "post" in methods)


def connection_of(response: httpx.Response) -> object:
    return response.extensions["network_stream"].get_extra_info("client_addr")


def test_every_hostile_body_is_refused_with_a_name_and_the_connection_goes_on(start: Start) -> None:
    service: Service = start(FAKE, "0", "--port", "0")
    with httpx.Client(timeout=WAIT_S) as http:
        paths = post_routes(http, service.url)
        assert set(GOOD) <= set(paths)
        connection = connection_of(http.get(f"{service.url}/livez"))
        for path in paths:
            for name, (content_type, body) in BODIES.items():
                headers = {"Content-Type": content_type}
                answer = http.post(f"{service.url}{path}", content=body(path), headers=headers)
                told = f"{path}, {name}: {answer.status_code} {answer.text[:300]}"
                assert 400 <= answer.status_code < 500, told
                error = answer.json()["error"]
                assert error if isinstance(error, str) else error["code"], told
                assert len(answer.text) < 1000, told
                assert connection_of(answer) == connection, told
            if path in GOOD:
                answer = http.post(f"{service.url}{path}", json=GOOD[path])
                assert answer.status_code == 200
                assert connection_of(answer) == connection
    assert "raceback" not in service.log_text()
