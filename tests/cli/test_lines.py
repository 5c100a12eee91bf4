import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli import lines as lines_module
from app.cli.lines import Line, LineDecoder, LineSplitter, lines_of_descriptor, lines_of_file
from app.errors import InvalidOption, InvalidRequest, RequestTooLarge

chunks = st.lists(
    st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\x85", b"\xe2\x80\xa8", b"\x0b"])).map(b"".join)
)


@given(chunks=chunks)
def test_lines_join_to_the_bytes_they_came_from_however_those_are_cut(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)] + list(splitter.finish())
    whole = b"".join(chunks)
    assert b"".join(line.content + line.ending for line in lines) == whole
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    assert all(line.ending in {b"\n", b"\r\n"} for line in lines[:-1])
    assert all(b"\n" not in line.content for line in lines)
    assert [line.content + line.ending for line in lines] == whole.splitlines(keepends=True) or b"\r" in whole


def test_only_lf_and_crlf_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\rb\x0c\xc2\x85\r\n\n\r\r\nlast")
    assert list(lines_of_file(path)) == [
        Line(1, b"a\rb\x0c\xc2\x85", b"\r\n"),
        Line(2, b"", b"\n"),
        Line(3, b"\r", b"\r\n"),
        Line(4, b"last", b""),
    ]


def test_a_line_without_end_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 10)
    splitter = LineSplitter()
    assert list(splitter.feed(b"ok\n12345")) == [Line(1, b"ok", b"\n")]
    with pytest.raises(RequestTooLarge, match="line 2 has more than 10 bytes"):
        list(splitter.feed(b"678901"))


async def test_lines_of_a_pipe_come_before_it_is_closed() -> None:
    reading, writing = os.pipe()
    try:
        lines = lines_of_descriptor(reading)
        os.write(writing, b"one\ntw")
        assert await anext(lines) == Line(1, b"one", b"\n")
        coming = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        assert not coming.done()
        os.write(writing, b"o\n")
        assert await asyncio.wait_for(coming, 10) == Line(2, b"two", b"\n")
    finally:
        os.close(writing)
    assert [line async for line in lines] == []
    os.close(reading)


async def test_lines_of_a_redirected_file_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one\ntwo")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert [line.content async for line in lines_of_descriptor(descriptor)] == [b"one", b"two"]
    finally:
        os.close(descriptor)


def test_bytes_of_another_encoding_name_the_line_and_a_remedy() -> None:
    with pytest.raises(InvalidRequest, match=r"line 7 is not valid utf-8 \(byte 3.*--encoding latin-1"):
        LineDecoder("utf-8").decode(Line(7, b"ol\xe1", b"\n"))
    assert LineDecoder("latin-1").decode(Line(7, b"ol\xe1", b"\n")) == "olá"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le", "cp037"])
def test_an_encoding_that_writes_line_ends_otherwise_is_refused(encoding: str) -> None:
    with pytest.raises(InvalidOption, match="iconv"):
        LineDecoder(encoding)


@pytest.mark.parametrize("encoding", ["klingon", "hex", "rot13", ""])
def test_an_encoding_that_is_none_is_refused(encoding: str) -> None:
    with pytest.raises(InvalidOption, match="not a known encoding"):
        LineDecoder(encoding)


def test_an_encoding_that_refuses_every_text_is_refused() -> None:
    with pytest.raises(InvalidOption, match="not a known encoding"):
        LineDecoder("undefined")


def test_a_codec_that_fails_in_a_way_of_its_own_names_the_line() -> None:
    decoder = LineDecoder("idna")
    with pytest.raises(InvalidRequest, match="line 3 is not valid idna"):
        decoder.decode(Line(3, b"xn--" + b"a" * 80, b"\n"))
