"""The border where requests become metrics by language pair, trace ids and spans."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.engine_protocol import TranslationEngine
from app.errors import DragomanError, RequestCancelled
from app.observability import NO_PAIR, Metrics, method_label
from app.observability.trace_context import current_trace
from app.observability.tracing import RequestTrace, Tracer, TranslationFacts, counts_of, stages_of
from app.runtime.request import TranslationRequest, TranslationResult


@dataclass
class _Exchange:
    """What is found out about one HTTP request on its way."""

    trace: RequestTrace
    pair: str = NO_PAIR
    status: int | None = None


_exchange: ContextVar[_Exchange | None] = ContextVar("dragoman_exchange", default=None)


class TraceRequests:
    """Gives every request its place in a trace, on its log lines and in its answer, and counts it by pair.

    The outermost middleware, and plain ASGI like the others.
    """

    def __init__(self, app: ASGIApp, *, tracer: Tracer, metrics: Metrics, paths: frozenset[str]) -> None:
        """Wrap `app`, whose routes have these `paths`."""
        self._app = app
        self._tracer = tracer
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Mapping[str, str] = Headers(scope=scope)
        exchange = _Exchange(self._tracer.begin(method_label(scope["method"]), headers=headers))
        context = exchange.trace.context

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                MutableHeaders(scope=message)["traceresponse"] = context.header()
            await send(message)

        exchange_before, trace_before = _exchange.set(exchange), current_trace.set(context)
        try:
            await self._app(scope, receive, send_traced)
        finally:
            _exchange.reset(exchange_before)
            current_trace.reset(trace_before)
            route = scope["path"] if scope["path"] in self._paths else "unmatched"
            status = exchange.status or 500
            self._metrics.pair_answered(exchange.pair, route=route, status=status)
            exchange.trace.finish(route=route, status=status)


class _ObservedEngine:
    """An engine whose translations are counted and traced; everything else is the engine's own."""

    def __init__(self, engine: TranslationEngine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def translate(self, request: TranslationRequest) -> TranslationResult:
        """Translate, and say how it went."""
        pair = self._pair_of(request)
        exchange = _exchange.get()
        if exchange is not None:
            exchange.pair = pair
        started_at_ns, started_ns = time.time_ns(), time.monotonic_ns()
        error_code, result = DragomanError.code, None
        try:
            result = await self._engine.translate(request)
        except DragomanError as error:
            error_code = error.code
            raise
        except asyncio.CancelledError:
            error_code = RequestCancelled.code
            raise
        finally:
            # The wall clock may jump meanwhile; a span may not end before it starts.
            ended_at_ns = started_at_ns + time.monotonic_ns() - started_ns
            facts = (
                TranslationFacts(pair, started_at_ns, ended_at_ns, error_code=error_code)
                if result is None
                else TranslationFacts(
                    pair,
                    started_at_ns,
                    ended_at_ns,
                    stages=stages_of(result.timings),
                    counts=counts_of(result),
                    model=result.model,
                )
            )
            self._count(facts, result)
            if exchange is not None:
                exchange.trace.translated(facts)
        return result

    def _count(self, facts: TranslationFacts, result: TranslationResult | None) -> None:
        if result is None:
            self._metrics.request_failed(facts.pair, error_code=facts.error_code)
            return
        if result.timings.decode_s > 0:  # else there was nothing to decode, or the cache had it all
            self._metrics.first_row(facts.pair, seconds=result.timings.first_row_s)
        for text in result.texts:
            for warning in text.warnings:
                self._metrics.warned(result.model, warning.code.value)

    def _pair_of(self, request: TranslationRequest) -> str:
        """The pair as a label: one that is served, whatever a caller may ask for."""
        wanted = (request.source, request.target)
        is_served = any((pair.source, pair.target) == wanted for pair in self._engine.pairs)
        return f"{request.source}-{request.target}" if is_served else NO_PAIR


def observed(engine: TranslationEngine, metrics: Metrics) -> TranslationEngine:
    """The engine with its translations counted and traced."""
    # Handing on by name: the rest of the engine's interface is none of this file's business.
    return cast(TranslationEngine, _ObservedEngine(engine, metrics))
