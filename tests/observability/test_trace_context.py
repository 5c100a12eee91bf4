import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.observability.trace_context import TraceContext, new_trace, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # unknown flags are ignored
        (f" 00-{TRACE}-{SPAN}-01\t", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
def test_a_valid_header_is_read(header: str, sampled: bool) -> None:
    assert parse_traceparent(header) == TraceContext(TRACE, SPAN, sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "secret",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_a_malformed_header_is_no_header(header: str) -> None:
    assert parse_traceparent(header) is None


@given(st.text())
def test_no_header_raises(header: str) -> None:
    parse_traceparent(header)


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())
def test_what_is_written_is_read(trace: int, span: int, sampled: bool) -> None:
    context = TraceContext(f"{trace:032x}", f"{span:016x}", sampled)
    assert parse_traceparent(context.header()) == context


def test_a_child_keeps_the_trace_and_has_an_id_of_its_own() -> None:
    parent = new_trace()
    child = parent.child()
    assert (child.trace_id, child.sampled) == (parent.trace_id, parent.sampled)
    assert child.span_id != parent.span_id
    assert parse_traceparent(child.header()) == child
