"""How much each caller may ask for: requests at the door, characters when a translation is asked for.

The counting is throttled-py's: rates by GCRA, which needs one number per caller and knows exactly when a
refused request would fit; days by a counter from midnight UTC. Its store forgets the least recently seen
callers beyond a limit, so memory is bounded. Everything here runs in the event loop, so looking and taking
are one step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from throttled import BaseRateLimiter, MemoryStore, RateLimitState, per_day, per_min, per_sec
from throttled.rate_limiter.fixed_window import FixedWindowRateLimiter
from throttled.rate_limiter.gcra import GCRARateLimiter

from app.api.authentication import Caller, current_caller
from app.api.engine_protocol import TranslationEngine
from app.api.errors import Dialect, QuotaExceeded, RateLimited, error_response
from app.errors import DragomanError, RequestCancelled, RequestTooLarge
from app.keys import Limits
from app.runtime.request import TranslationRequest, TranslationResult

MAX_COUNTED = 65_536
"""Most counters held, of keys and of addresses each; beyond them the least recently used are forgotten."""


@dataclass(frozen=True)
class Usage:
    """What a caller has used of its day.

    Attributes:
        num_characters: characters translated since midnight UTC, or since the service started.
        max_characters: the limit.
        reset_s: seconds until midnight UTC.
    """

    num_characters: int
    max_characters: int
    reset_s: float


@dataclass(frozen=True, eq=False)
class _Rule:
    """One limit of one caller.

    Attributes:
        policy: its name in the RateLimit headers.
        unit: what it counts, as messages say it.
        period: what for, as messages say it.
        limiter: what counts.
        limit: how many.
        of_the_day: whether they end at midnight instead of refilling.
    """

    policy: str
    unit: str
    period: str
    limiter: BaseRateLimiter
    limit: int
    of_the_day: bool


class Counters:
    """All callers' counters."""

    def __init__(self, *, max_counted: int = MAX_COUNTED) -> None:
        """Count nothing yet."""
        # Strangers must not be able to push out the counters of keys, so these are kept apart.
        self._of_keys = MemoryStore(options={"MAX_SIZE": max_counted})
        self._of_addresses = MemoryStore(options={"MAX_SIZE": max_counted})
        self._rules = functools.lru_cache(maxsize=4096)(self._make_rules)

    def meter(self, caller: Caller) -> Meter:
        """What counts one request of a caller."""
        return Meter(caller.identity, self._rules(caller.limits, caller.key is not None))

    def _make_rules(self, limits: Limits, has_key: bool) -> tuple[_Rule, ...]:
        store = self._of_keys if has_key else self._of_addresses

        def rules() -> Iterator[_Rule]:
            # The rate of a unit comes before its day, see `Meter`.
            if limit := limits.requests_per_second:
                limiter: BaseRateLimiter = GCRARateLimiter(per_sec(limit), store, key_prefix="requests")
                yield _Rule("requests", "requests", "second", limiter, limit, of_the_day=False)
            if limit := limits.characters_per_minute:
                limiter = GCRARateLimiter(per_min(limit), store, key_prefix="characters")
                yield _Rule("characters", "characters", "minute", limiter, limit, of_the_day=False)
            if limit := limits.characters_per_day:
                limiter = FixedWindowRateLimiter(per_day(limit), store, key_prefix="day")
                yield _Rule("day", "characters", "day", limiter, limit, of_the_day=True)

        return tuple(rules())


class Meter:
    """Counts one request and its characters."""

    def __init__(self, identity: str, rules: tuple[_Rule, ...]) -> None:
        """Count for the caller that is known as `identity`."""
        self._identity = identity
        self._rules = rules
        self._states: dict[_Rule, RateLimitState] = {}

    def take_request(self) -> None:
        """Count the request itself.

        Raises:
            RateLimited: too soon; the request was not counted.
        """
        self._take("requests", 1)

    def take_characters(self, num_characters: int) -> None:
        """Count characters of source text, under all limits or, refused, under none.

        Raises:
            RequestTooLarge: the request alone exceeds a limit, so waiting would not help.
            RateLimited: too soon.
            QuotaExceeded: the day's characters do not suffice.
        """
        self._take("characters", num_characters)

    def give_back_characters(self, num_characters: int) -> None:
        """Undo the day's count of what was not translated; rates refill by themselves."""
        for rule in self._rules:
            if rule.of_the_day:
                self._states[rule] = rule.limiter.limit(self._identity, -num_characters).state

    def usage(self) -> Usage | None:
        """What was used of the day; None without such a limit."""
        for rule in self._rules:
            if rule.of_the_day:
                state = rule.limiter.peek(self._identity)
                return Usage(rule.limit - state.remaining, rule.limit, state.reset_after)
        return None

    def headers(self) -> dict[str, str]:
        """The fields RateLimit-Policy and RateLimit (draft-ietf-httpapi-ratelimit-headers-10)."""
        states = [(rule, self._states.get(rule) or rule.limiter.peek(self._identity)) for rule in self._rules]
        return {
            "RateLimit-Policy": ", ".join(
                f'"{rule.policy}";q={rule.limit};w={rule.limiter.quota.get_period_sec()}'
                for rule, _ in states
            ),
            "RateLimit": ", ".join(
                f'"{rule.policy}";r={state.remaining};t={_whole_s(state.reset_after)}'
                for rule, state in states
            ),
        }

    def _take(self, unit: str, count: int) -> None:
        rules = [rule for rule in self._rules if rule.unit == unit]
        # A counter of the day counts what it refuses too, so it is asked before; a rate does not, and is the
        # only one of its unit.
        for rule in rules:
            if rule.of_the_day:
                state = rule.limiter.peek(self._identity)
                if count > state.remaining:
                    raise self._refusal(rule, state, count)
        for rule in rules:
            result = rule.limiter.limit(self._identity, count)
            state = self._states[rule] = result.state
            if result.limited:
                raise self._refusal(rule, state, count)

    def _refusal(self, rule: _Rule, state: RateLimitState, count: int) -> DragomanError:
        limit = f"the limit is {rule.limit} {rule.unit} per {rule.period}"
        if count > rule.limit:
            return RequestTooLarge(
                f"Invalid request: the request has {count} {rule.unit}, {limit} for this caller; "
                "send it in several requests"
            )
        if rule.of_the_day:
            wait_s = state.reset_after
            return QuotaExceeded(
                f"{limit}, {state.remaining} are left and this request has {count}; the next day begins in "
                f"{_whole_s(wait_s)} s",
                retry_after_s=wait_s,
            )
        return RateLimited(f"{limit}; wait {_whole_s(state.retry_after)} s", retry_after_s=state.retry_after)


def _whole_s(seconds: float) -> int:
    """Seconds as headers say them: never earlier than true."""
    return max(0, -int(-seconds // 1))


_meter: ContextVar[Meter | None] = ContextVar("dragoman_meter", default=None)


def current_meter() -> Meter | None:
    """What counts the request that is being answered; None where nothing is limited."""
    return _meter.get()


class RateLimits:
    """Refuses requests that come too fast, and tells limited callers what is left."""

    def __init__(self, app: ASGIApp, *, counters: Counters) -> None:
        """Wrap `app`; `Authentication` must stand before this."""
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        caller = current_caller()
        if caller is None or not caller.limits.any_set:
            await self._app(scope, receive, send)
            return
        meter = self._counters.meter(caller)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(meter.headers())
            await send(message)

        try:
            meter.take_request()
        except DragomanError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1013})
                return
            await error_response(error, Dialect.of(scope["path"]))(scope, receive, send_with_headers)
            return
        token = _meter.set(meter)
        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            _meter.reset(token)


class _MeteredEngine:
    """An engine that counts each caller's characters before it translates them.

    Here rather than in the routes, so that no dialect can forget it. Everything else is the engine's own.
    """

    def __init__(self, engine: TranslationEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        """Count the characters, then translate; what the engine refuses is not counted against the day."""
        meter = current_meter()
        if meter is None:
            return await self._engine.translate(request)
        num_characters = sum(map(len, request.texts))
        meter.take_characters(num_characters)
        try:
            return await self._engine.translate(request)
        except RequestCancelled:
            # Work was done for a caller that left.
            raise
        except DragomanError:
            meter.give_back_characters(num_characters)
            raise


def metered(engine: TranslationEngine) -> TranslationEngine:
    """The engine, with each caller's limits on characters kept."""
    # Handing on by name: the rest of the engine's interface is none of this file's business.
    return cast(TranslationEngine, _MeteredEngine(engine))
