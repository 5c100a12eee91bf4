"""Looking after the workers: each shows that it can translate, and one that fails is replaced once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from app.runtime.crew import Crew, Seat
from app.runtime.worker import Worker

LOOK_EVERY_S = 0.25


async def supervise(
    crew: Crew,
    prove: Callable[[Seat], Awaitable[None]],
    *,
    max_heartbeat_age_s: float,
    on_proven: Callable[[], None],
) -> str:
    """Have every worker proven, then look after all, until one seat's second worker fails.

    Args:
        crew: started workers.
        prove: translates a canary on this seat's worker; raises if that fails.
        max_heartbeat_age_s: seconds without a sign of life after which a worker counts as hanging.
        on_proven: called when every first worker has been proven.

    Returns:
        Why the process had better end. A canary that fails on a worker that lives is such a reason: the
        model cannot translate, and another thread will not change that.
    """
    proofs: dict[asyncio.Future[None], tuple[Seat, Worker]] = {}
    unproven: list[Seat] = list(crew.seats)
    all_proven = False
    try:
        while True:
            for seat in unproven:
                seat.on_trial = True
                proofs[asyncio.ensure_future(prove(seat))] = (seat, seat.worker)
            if proofs:
                await asyncio.wait(proofs, timeout=LOOK_EVERY_S)
            else:
                await asyncio.sleep(LOOK_EVERY_S)
            unproven, broken = await crew.look(max_heartbeat_age_s=max_heartbeat_age_s)
            if broken is not None:
                return broken
            for proof in [proof for proof in proofs if proof.done()]:
                seat, worker = proofs.pop(proof)
                error = proof.exception()
                if error is None:
                    seat.on_trial = False
                elif seat.worker is worker and not crew.stopping:
                    return f"a canary was not translated: {error}"
            if not proofs and not unproven and not all_proven:
                all_proven = True
                on_proven()
    finally:
        for proof in proofs:
            proof.cancel()
