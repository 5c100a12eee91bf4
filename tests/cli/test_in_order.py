import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.cli.in_order import Window, in_order
from app.errors import InvalidRequest


async def numbers(count: int, *, fault_after: int | None = None) -> AsyncIterator[int]:
    for number in range(count):
        if number == fault_after:
            raise InvalidRequest("line is broken")
        yield number


class Work:
    """Finishes items in a given order of ranks, and measures what is in flight."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self.num_in_flight = self.most_in_flight = self.num_cancelled = 0
        self.three_in_flight = asyncio.Event()

    async def __call__(self, item: int) -> int:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        if self.num_in_flight == 3:
            self.three_in_flight.set()
        try:
            for _ in range(self.ranks[item]):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_in_flight -= 1
        return item * 10


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(st.integers(0, 12), max_size=40), max_items=st.integers(1, 8), max_size=st.integers(1, 20)
)
def test_results_come_in_order_and_the_window_holds(ranks: list[int], max_items: int, max_size: int) -> None:
    work = Work(ranks)

    async def run() -> list[tuple[int, int]]:
        window = Window(max_items, max_size)
        return [
            pair async for pair in in_order(numbers(len(ranks)), work, size_of=lambda _: 3, window=window)
        ]

    assert asyncio.run(run()) == [(number, number * 10) for number in range(len(ranks))]
    assert work.most_in_flight <= max(1, min(max_items, max_size // 3))


async def test_the_window_is_kept_full() -> None:
    work = Work([5] * 50)
    async for _ in in_order(numbers(50), work, size_of=lambda _: 1, window=Window(8, 100)):
        pass
    assert work.most_in_flight == 8


async def test_what_was_read_before_a_fault_is_finished_first() -> None:
    seen = []

    async def run() -> None:
        async for item, _ in in_order(
            numbers(9, fault_after=5), Work([9, 3, 5, 0, 7]), size_of=lambda _: 1, window=Window(3, 9)
        ):
            seen.append(item)

    with pytest.raises(InvalidRequest):
        await run()
    assert seen == [0, 1, 2, 3, 4]


async def test_a_fault_of_the_work_ends_all_of_it() -> None:
    work = Work([0, 1000, 1000])

    async def failing(item: int) -> int:
        if item == 0:
            raise InvalidRequest("no")
        return await work(item)

    with pytest.raises(InvalidRequest):
        async for _ in in_order(numbers(3), failing, size_of=lambda _: 1, window=Window(3, 9)):
            pass
    assert work.num_in_flight == 0


async def test_closing_early_cancels_what_is_in_flight() -> None:
    work = Work([0, *[100_000] * 9])
    async with aclosing(in_order(numbers(10), work, size_of=lambda _: 1, window=Window(4, 9))) as results:
        assert await anext(results) == (0, 0)
        async with asyncio.timeout(10):
            await work.three_in_flight.wait()
    assert work.num_in_flight == 0
    assert work.num_cancelled == 3
