import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from app.observability import configure_logging, frames_of


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = before
    root.setLevel(level)


def encoding_error() -> UnicodeEncodeError:
    try:
        "secret \ud800".encode()
    except UnicodeEncodeError as error:
        return error
    raise AssertionError("a lone surrogate was encoded")


def test_frames_show_class_and_place_but_no_message() -> None:
    frames = frames_of(encoding_error())
    assert frames[0] == "builtins.UnicodeEncodeError"
    assert frames[-1].endswith("in encoding_error")
    assert "secret" not in " ".join(frames)


def test_frames_begin_with_the_cause() -> None:
    try:
        try:
            raise KeyError("secret")
        except KeyError as error:
            raise RuntimeError("secret") from error
    except RuntimeError as error:
        frames = frames_of(error)
    assert frames[0] == "builtins.KeyError"
    assert "builtins.RuntimeError" in frames[frames.index("then") :]
    assert "secret" not in " ".join(frames)


@pytest.mark.parametrize("logger", [logging.getLogger("uvicorn.error"), logging.getLogger("elsewhere")])
def test_foreign_tracebacks_are_written_without_their_messages(
    stream: io.StringIO, logger: logging.Logger
) -> None:
    configure_logging("json", "info", stream=stream)
    try:
        raise ValueError("secret")
    except ValueError:
        logger.exception("it failed")
    line = json.loads(stream.getvalue())
    assert line["event"] == "it failed"
    assert line["level"] == "error"
    assert line["traceback"][0] == "builtins.ValueError"
    assert "secret" not in stream.getvalue()


def test_console_lines_are_written_without_messages_of_errors_too(stream: io.StringIO) -> None:
    configure_logging("console", "info", stream=stream)
    try:
        raise ValueError("secret")
    except ValueError:
        structlog.get_logger("x").exception("it failed")
    assert "it failed" in stream.getvalue()
    assert "secret" not in stream.getvalue()


def test_the_servers_own_access_lines_are_off(stream: io.StringIO) -> None:
    configure_logging("json", "debug", stream=stream)
    logging.getLogger("uvicorn.access").info('"GET /translate?q=secret HTTP/1.1" 200')
    assert stream.getvalue() == ""


def test_lines_below_the_level_are_not_written(stream: io.StringIO) -> None:
    configure_logging("json", "warning", stream=stream)
    log = structlog.get_logger("x")
    log.info("quiet")
    log.warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_bound_request_ids_are_on_every_line(stream: io.StringIO) -> None:
    configure_logging("json", "info", stream=stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger("x").info("ours")
        logging.getLogger("theirs").info("theirs")
    assert [json.loads(line)["request_id"] for line in stream.getvalue().splitlines()] == ["r1", "r1"]


def deep(depth: int) -> None:
    if depth == 0:
        raise ValueError("secret")
    deep(depth - 1)


def test_a_deep_stack_is_shown_by_its_innermost_frames() -> None:
    with pytest.raises(ValueError, match="secret") as caught:
        deep(500)
    frames = frames_of(caught.value)
    assert len(frames) < 50
    assert frames[0] == "builtins.ValueError"
    assert frames[1].endswith(" frames left out")
    assert frames[-1].endswith(" in deep")


def test_a_long_or_circular_chain_of_causes_is_shown_by_its_last_links() -> None:
    error = ValueError("secret")
    for number in range(2000):
        effect = KeyError(number)
        effect.__cause__ = error
        error = effect
    assert len(frames_of(error)) < 50
    first, second = KeyError(1), ValueError(2)
    first.__cause__, second.__cause__ = second, first
    assert frames_of(first) == ["builtins.ValueError", "then", "builtins.KeyError"]
