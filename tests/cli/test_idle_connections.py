"""Which connections go when there are too many, and which never do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from app.cli.idle_connections import IdleConnections


class Connection:
    """Knows only that it was to be closed."""

    closed = False

    def timeout_keep_alive_handler(self) -> None:
        self.closed = True


class House:
    """Connections in number, as a server has them, and a clock."""

    def __init__(self, max_connections: int) -> None:
        self.now_s = 100.0
        files = max_connections - IdleConnections(max_files=lambda: 10_000, num_other_files=0).max_connections
        self.idle = IdleConnections(
            max_files=lambda: 10_000 + files, num_other_files=0, clock=lambda: self.now_s
        )
        self.open: list[Connection] = []

    def connect(self) -> Connection:
        connection = Connection()
        self.open.append(connection)
        self.idle.make_room(len(self.open))
        self.idle.add(connection)
        return connection

    def lose_closed(self) -> None:
        for connection in [one for one in self.open if one.closed]:
            self.open.remove(connection)
            self.idle.discard(connection)


def test_the_longest_idle_goes_for_each_one_too_many() -> None:
    house = House(10)
    first, second, *others = [house.connect() for _ in range(10)]
    house.now_s += 5
    house.idle.add(first)  # it asked and was answered
    house.now_s += 5
    house.connect()
    assert second.closed
    assert not any(one.closed for one in [first, *others])
    house.lose_closed()
    house.connect()
    assert [one.closed for one in others] == [True] + [False] * 7


def test_one_that_is_being_closed_already_makes_room_for_one_newcomer_only() -> None:
    house = House(10)
    old = [house.connect() for _ in range(10)]
    house.now_s += 5
    for _ in range(3):
        house.connect()
    assert [one.closed for one in old] == [True] * 3 + [False] * 7


def test_connections_with_a_request_stay_however_many_there_are() -> None:
    house = House(10)
    busy = [house.connect() for _ in range(10)]
    for one in busy:
        house.idle.discard(one)
    house.now_s += 5
    newcomers = [house.connect() for _ in range(20)]
    assert not any(one.closed for one in [*busy, *newcomers]), "newcomers may be about to ask"
    house.now_s += 5
    house.connect()
    assert [one.closed for one in newcomers] == [True] * 20
    assert not any(one.closed for one in busy)


def test_so_many_newcomers_that_files_would_run_out_go_at_once() -> None:
    house = House(10)
    newcomers = [house.connect() for _ in range(200)]
    assert any(one.closed for one in newcomers)
    assert not any(one.closed for one in newcomers[-10:])


def test_nothing_is_closed_while_there_is_room_and_a_limit_lowered_later_counts() -> None:
    max_files = 10_000
    idle = IdleConnections(max_files=lambda: max_files, num_other_files=100, clock=lambda: 0.0)
    connections = [Connection() for _ in range(9_000)]
    for number, one in enumerate(connections):
        idle.make_room(number)
        idle.add(one)
    assert not any(one.closed for one in connections)
    max_files = 1_000
    idle.make_room(len(connections))
    assert sum(not one.closed for one in connections) < 1_000


@given(st.lists(st.sampled_from(["connect", "ask", "answer", "lose", "wait"]), max_size=200))
def test_closed_or_not_no_connection_is_counted_twice(events: list[str]) -> None:
    house = House(10)
    busy: set[Connection] = set()
    for event in events:
        if event == "connect":
            house.connect()
        elif event == "ask" and (asking := [one for one in house.open if not one.closed]):
            busy.add(asking[0])
            house.idle.discard(asking[0])
        elif event == "answer" and busy:
            answered = busy.pop()
            house.idle.add(answered)
            house.idle.make_room(len(house.open))
        elif event == "lose":
            house.lose_closed()
        elif event == "wait":
            house.now_s += 5
        assert not any(one.closed for one in busy)
    house.now_s += 5
    house.lose_closed()
    house.idle.make_room(len(house.open))
    house.lose_closed()
    assert len(house.open) <= max(10, len(busy))


def test_the_log_says_so_once_a_minute() -> None:
    house = House(10)
    with capture_logs() as lines:
        for _ in range(30):
            house.connect()
            house.now_s += 2
            house.lose_closed()
        house.now_s += 60
        house.connect()
    assert [line["event"] for line in lines] == ["idle_connections_closed"] * 2
    assert lines[0]["num_closed"] == 1
    assert lines[1]["num_closed"] == 21


@pytest.mark.parametrize("limit", [0, 20, 64])
def test_a_tiny_limit_leaves_a_few_connections(limit: int) -> None:
    assert IdleConnections(max_files=lambda: limit, num_other_files=30).max_connections > 0


def test_the_process_says_how_many_files_it_may_open() -> None:
    assert IdleConnections().max_connections > 0
