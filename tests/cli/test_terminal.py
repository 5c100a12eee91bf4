"""A hang-up is told from a request to reload by what became of the terminal."""

from __future__ import annotations

import os
import pty

from app.cli.terminal import has_hung_up


def test_a_terminal_has_hung_up_once_its_other_side_is_closed() -> None:
    window, program = pty.openpty()
    try:
        assert not has_hung_up(program)
        os.close(window)
        assert has_hung_up(program)
    finally:
        os.close(program)


def test_what_is_no_terminal_never_hangs_up() -> None:
    reader, writer = os.pipe()
    with open(os.devnull) as nothing:
        assert not has_hung_up(nothing.fileno())
    os.close(writer)
    assert not has_hung_up(reader)
    os.close(reader)
    assert not has_hung_up(reader)
