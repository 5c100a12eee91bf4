"""Request lines that RFC 9112 has servers accept: after an empty line, and with the host in the target."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli.request_lines import LenientConnection

HEAD = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


def connection() -> LenientConnection:
    return LenientConnection(h11.SERVER, 16_384)


def request(content: bytes, *, piece: int = 1_000_000) -> h11.Request:
    """The request that the bytes are, received in pieces."""
    reading = connection()
    event: object = h11.NEED_DATA
    for start in range(0, len(content), piece):
        assert event is h11.NEED_DATA
        reading.receive_data(content[start : start + piece])
        event = reading.next_event()
    assert isinstance(event, h11.Request)
    return event


@pytest.mark.parametrize("piece", [1, 2, 3, 1000])
@pytest.mark.parametrize("line", [b"\r\n", b"\n", b""])
def test_an_empty_line_before_a_request_is_ignored(line: bytes, piece: int) -> None:
    assert request(line + HEAD, piece=piece).target == b"/livez"


@pytest.mark.parametrize("lines", [b"\r\n\r\n", b"\n\n", b"\r\r\n", b"\r ", b" \r\n"])
def test_more_than_that_is_no_request(lines: bytes) -> None:
    reading = connection()
    reading.receive_data(lines + HEAD)
    with pytest.raises(h11.RemoteProtocolError):
        reading.next_event()


def test_an_empty_line_behind_a_body_is_ignored_before_each_further_request() -> None:
    reading = connection()
    post = b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc\r\n"
    reading.receive_data(post * 3)
    for _ in range(3):
        events = [reading.next_event() for _ in range(3)]
        assert [type(event) for event in events] == [h11.Request, h11.Data, h11.EndOfMessage]
        assert reading.next_event() is h11.PAUSED
        for event in (h11.Response(status_code=200, headers=[("content-length", "0")]), h11.EndOfMessage()):
            reading.send(event)
        reading.start_next_cycle()
    assert reading.next_event() is h11.NEED_DATA
    assert reading.trailing_data == (b"", False)


@pytest.mark.parametrize(
    ("target", "host", "path"),
    [
        (b"http://other/livez", b"other", b"/livez"),
        (b"HTTP://Other:8000/livez?a=http://b/c", b"Other:8000", b"/livez?a=http://b/c"),
        (b"https://[::1]:443/v1/translate", b"[::1]:443", b"/v1/translate"),
        (b"http://other", b"other", b"/"),
        (b"http://other?a=1", b"other", b"/?a=1"),
        (b"/http://other/", b"x", b"/http://other/"),
        (b"*", b"x", b"*"),
        (b"ftp://other/", b"x", b"ftp://other/"),
        (b"livez", b"x", b"livez"),
    ],
)
def test_a_target_with_a_host_means_its_path_and_its_host_counts(
    target: bytes, host: bytes, path: bytes
) -> None:
    got = request(b"OPTIONS " + target + b" HTTP/1.1\r\nA: 1\r\nHost: x\r\nB: 2\r\n\r\n")
    assert got.target == path
    headers = list(got.headers)
    assert [value for name, value in headers if name == b"host"] == [host]
    assert [pair for pair in headers if pair[0] != b"host"] == [(b"a", b"1"), (b"b", b"2")]


def test_a_target_with_a_host_needs_no_host_header_from_old_clients() -> None:
    got = request(b"GET http://other/livez HTTP/1.0\r\n\r\n")
    assert (got.target, list(got.headers), got.http_version) == (b"/livez", [(b"host", b"other")], b"1.0")


@pytest.mark.parametrize("target", [b"http:///livez", b"http://user:secret@other/livez", b"https://"])
def test_a_target_without_host_or_with_credentials_is_refused(target: bytes) -> None:
    with pytest.raises(h11.RemoteProtocolError):
        request(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")


@given(st.binary(max_size=60) | st.text("\r\n GETht:/p.1 *?#@", max_size=60).map(str.encode))
def test_whatever_comes_is_a_request_or_refused(content: bytes) -> None:
    reading = connection()
    reading.receive_data(content + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    try:
        reading.next_event()
    except h11.RemoteProtocolError:
        assert reading.our_state is not h11.ERROR, "it can still be told so"
