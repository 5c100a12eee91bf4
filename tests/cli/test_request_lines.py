"""Request lines that RFC 9112 has servers accept: after an empty line, and with the host in the target."""

from __future__ import annotations

import string
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from urllib.parse import quote, urlsplit

import h11
import pytest
from hypothesis import example, given
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
        (b"http://my_service:08000/livez", b"my_service:08000", b"/livez"),
        (b"http://127.0.0.1:/livez", b"127.0.0.1:", b"/livez"),
        (b"http://b%C3%BCcher.example/livez", b"b%C3%BCcher.example", b"/livez"),
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


NAME_CHARACTERS = string.ascii_letters + string.digits + "-._~" + "!$&'()*+,;="
"""RFC 3986, section 2: unreserved and sub-delims."""


def is_accepted(authority: str) -> bool:
    try:
        got = request(f"GET http://{authority}/livez HTTP/1.1\r\nHost: x\r\n\r\n".encode("ascii"))
    except h11.RemoteProtocolError:
        return False
    assert (got.target, dict(got.headers)[b"host"]) == (b"/livez", authority.encode("ascii"))
    return True


@pytest.mark.parametrize(
    "authority",
    [
        *(
            "[",
            "]",
            "[]",
            "[:::]",
            "[1.2.3.4]",
            "[x]",
            "[::1",
            "::1",
            "[::1]x",
            "x[::1]",
            "[::1]:x",
            "[[::1]]",
        ),
        *("[fe80::1%25eth0]", "[fe80::1%eth0]", "[v1.x]", "[::1.2.3.04]", "[::ffff:1.2.3.256]"),
        *(
            "x:abc",
            "x:-1",
            "x:+1",
            "x:1_0",
            "x:65536",
            "x:99999999",
            "x:0x50",
            "x:80:80",
            ":80",
            ":",
            "x:" + "9" * 5000,
        ),
        *('"x', "a b", "a\\b", "a<b", "a|b", "a^b", "a`b", "{x}", "a@b", "@", "x#y", "#"),
        *(
            "%00",
            "%",
            "%4",
            "%zz",
            "a%2Fb",
            "a%40b",
            "a%3A80",
            "%25",
            "%7F",
            "%C2%85",
            "%FF",
            "%C3",
            "%ED%A0%80",
        ),
    ],
)
def test_a_target_whose_host_or_port_is_none_is_refused(authority: str) -> None:
    assert not is_accepted(authority)


@pytest.mark.parametrize("number", range(128))
def test_a_name_is_made_of_what_the_standard_allows_written_plainly_or_with_percent_signs(
    number: int,
) -> None:
    character = chr(number)
    is_allowed = character in NAME_CHARACTERS
    assert is_accepted(f"a%{number:02X}b") == is_accepted(f"%{number:02x}") == is_allowed
    if character not in "/?":  # the end of the host
        assert is_accepted(f"a{character}") == (is_allowed or character == ":")


@given(st.text(NAME_CHARACTERS + "é中😀", min_size=1))
def test_a_name_of_any_language_is_accepted_in_utf8(name: str) -> None:
    assert is_accepted(quote(name, safe="!$&'()*+,;="))


@given(st.ip_addresses(v=4))
def test_every_ipv4_address_is_accepted(address: IPv4Address) -> None:
    assert is_accepted(str(address))


@given(st.ip_addresses(v=6).flatmap(lambda a: st.sampled_from([str(a), a.exploded, str(a).upper()])))
def test_every_ipv6_address_is_accepted_in_brackets_alone(address: str) -> None:
    assert is_accepted(f"[{address}]")
    assert not is_accepted(address)


@given(st.lists(st.sampled_from(["::", ":", "0", "1f", "FFFF", "12345", "1.2.3.4", ".", "g"])).map("".join))
@example("1:2:3:4:5:6:7::")
@example("::2:3:4:5:6:7:8")
def test_in_brackets_is_what_the_standard_library_takes_for_an_ipv6_address(address: str) -> None:
    try:
        IPv6Address(address)
    except AddressValueError:
        assert not is_accepted(f"[{address}]")
    else:
        assert is_accepted(f"[{address}]")


@given(
    st.sampled_from(["x", "1.2.3.4", "[::1]"]),
    st.integers(0, 200_000).map(str)
    | st.integers(65_530, 65_540).map(lambda port: f"000{port}")
    | st.text(string.digits + "+-_.ax:%", max_size=8),
)
def test_a_port_is_what_the_standard_library_takes_for_one(host: str, port: str) -> None:
    authority = f"{host}:{port}"
    try:
        _ = urlsplit(f"http://{authority}/").port
    except ValueError:
        assert not is_accepted(authority)
    else:
        assert is_accepted(authority)


@given(st.text("".join(map(chr, range(0x21, 0x7F))).translate({ord("/"): None, ord("?"): None}), max_size=12))
@example("a%C3%BC:80")
def test_an_accepted_host_is_the_one_that_the_standard_library_reads(authority: str) -> None:
    if is_accepted(authority):
        parts = urlsplit(f"http://{authority}/livez")
        assert (parts.netloc, parts.path, parts.username, parts.fragment) == (authority, "/livez", None, "")
        assert parts.hostname


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST"])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("target", [b"http://[/livez", b"/a b"])
def test_the_answer_to_a_refused_head_ends_with_the_connection_and_is_not_chunked(
    method: bytes, is_first: bool, target: bytes
) -> None:
    reading = connection()
    if not is_first:
        reading.receive_data(HEAD)
        assert [type(reading.next_event()) for _ in range(2)] == [h11.Request, h11.EndOfMessage]
        for event in (h11.Response(status_code=200, headers=[("content-length", "0")]), h11.EndOfMessage()):
            reading.send(event)
        reading.start_next_cycle()
    reading.receive_data(method + b" " + target + b" HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n")
    with pytest.raises(h11.RemoteProtocolError):
        reading.next_event()
    head = h11.Response(status_code=400, headers=[("connection", "close")], reason="Bad Request")
    answer = b"".join(reading.send(event) for event in (head, h11.Data(data=b"no"), h11.EndOfMessage()))
    assert answer == b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\nno"


@given(st.binary(max_size=60) | st.text("\r\n GETht:/p.1 *?#@", max_size=60).map(str.encode))
def test_whatever_comes_is_a_request_or_refused(content: bytes) -> None:
    reading = connection()
    reading.receive_data(content + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    try:
        reading.next_event()
    except h11.RemoteProtocolError:
        assert reading.our_state is not h11.ERROR, "it can still be told so"
