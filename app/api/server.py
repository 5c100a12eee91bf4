"""The web application: routes, middleware and errors around one engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from app.api.access_described import describe_access
from app.api.authentication import AccessOptions, Authentication
from app.api.body_limits import BodyLimits, Drain
from app.api.docs_page import docs_page
from app.api.engine_protocol import TranslationEngine
from app.api.error_codes import error_codes
from app.api.errors import Dialect, error_response, http_exception_response
from app.api.health import health_router
from app.api.languages import LanguageTable
from app.api.libretranslate import (
    WARNINGS_HEADER,
    LibreTranslateBody,
    LibreTranslateForm,
    libretranslate_router,
)
from app.api.middleware import RequestContext
from app.api.native import native_router
from app.api.observed import TraceRequests, observed
from app.api.options import ApiOptions
from app.api.quotas import Counters, RateLimits, metered
from app.api.reload import Reload, reload_router
from app.api.schemas import TranslateBody
from app.api.security_headers import SecurityHeaders
from app.api.urgency import (
    PRIORITY_HEADER,
    TIMEOUT_HEADER,
    ReadUrgency,
    describe_urgency,
    urged,
)
from app.errors import DragomanError, InvalidRequest, RequestCancelled
from app.observability import Metrics
from app.observability.tracing import PlainTracer, Tracer

_CORS_MAX_AGE_S = 1_728_000
_DESCRIPTION = "Self-hosted machine translation: a native API below /v1 and LibreTranslate's at the root."


def create_app(
    engine: TranslationEngine,
    options: ApiOptions,
    *,
    metrics: Metrics,
    drain: Drain | None = None,
    tracer: Tracer | None = None,
    access: AccessOptions | None = None,
    reload: Reload | None = None,
) -> FastAPI:
    """Build the application around an opened, not yet started engine.

    The application's lifespan starts the engine, and stops it unless a drain has stopped it before.

    Args:
        engine: what translates.
        options: the web layer's limits.
        metrics: where requests are counted and what /metrics shows.
        drain: tells those that wait for a body when the service begins to stop.
        tracer: what begins the trace of each request; None gives ids to logs and answers, and no spans.
        access: who may use the service, and how much; None lets everybody do everything.
        reload: loads the bundles anew; None offers no such route.
    """
    engine = metered(urged(engine))

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            if not engine.draining:
                await engine.stop(drain_s=options.drain_s)

    app = FastAPI(
        title="Dragoman",
        version=options.version,
        description=_DESCRIPTION,
        lifespan=lifespan,
        # Served by a route of ours, which the metrics and the access log know.
        openapi_url=None,
        docs_url=None,
        # A redirect would repeat the query string, which may hold a text, in a header.
        redirect_slashes=False,
        redoc_url=None,
        # The framework's own telemetry would export query strings and error messages; both may hold texts.
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )
    languages = LanguageTable.following(lambda: engine.pairs)
    metrics.watch_engine(
        waiting_tokens=lambda: engine.num_waiting_tokens, running_requests=lambda: engine.num_running_requests
    )
    metrics.watch_state(
        draining=lambda: engine.draining,
        healthy=lambda: engine.healthy(max_heartbeat_age_s=options.max_heartbeat_age_s),
        pairs=lambda: engine.pairs,
    )
    metrics.watch_workers(heartbeat_ages_s=lambda: engine.heartbeat_ages_s, started=lambda: engine.started)
    engine = observed(engine, metrics)
    routers = (
        native_router(engine, languages, options),
        libretranslate_router(engine, languages, options),
        health_router(engine, options, metrics),
        _docs_router(app),
        *([] if reload is None else [reload_router(reload)]),
    )
    for router in routers:
        app.include_router(router)
    methods_of: defaultdict[str, set[str]] = defaultdict(set)
    for route in (route for router in routers for route in router.routes if isinstance(route, APIRoute)):
        methods_of[route.path] |= route.methods or set()
    paths = frozenset(methods_of)
    _add_error_handlers(app, methods_of)
    # The last one added is the outermost.
    app.add_middleware(ReadUrgency)
    app.add_middleware(RateLimits, counters=Counters())
    app.add_middleware(Authentication, options=AccessOptions() if access is None else access)
    app.add_middleware(
        BodyLimits,
        max_body_bytes=options.max_body_bytes,
        body_timeout_s=options.body_timeout_s,
        drain=Drain() if drain is None else drain,
    )
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-API-Key", TIMEOUT_HEADER, PRIORITY_HEADER],
            expose_headers=["X-Request-ID", "Retry-After", "RateLimit", "RateLimit-Policy", WARNINGS_HEADER],
            max_age=_CORS_MAX_AGE_S,
        )
    app.add_middleware(RequestContext, metrics=metrics, paths=paths)
    app.add_middleware(TraceRequests, tracer=tracer or PlainTracer(), metrics=metrics, paths=paths)
    app.add_middleware(SecurityHeaders)
    return app


def _docs_router(app: FastAPI) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            # These bodies are read by our own strict reader, so FastAPI does not know their schemas.
            for model in (TranslateBody, LibreTranslateBody, LibreTranslateForm):
                described = model.model_json_schema(ref_template="#/components/schemas/{model}")
                components.update(described.pop("$defs", {}))
                components[model.__name__] = described
            describe_access(schema)
            describe_urgency(schema)
            schema["x-error-codes"] = [asdict(code) for code in error_codes()]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # the documented way to extend the schema

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    @router.get("/openapi.json")
    async def document() -> JSONResponse:
        return JSONResponse(app.openapi())

    @router.get("/")
    async def root() -> RedirectResponse:
        # Relative, so that it also holds behind a proxy that serves this below another path.
        return RedirectResponse("docs")

    return router


def _add_error_handlers(app: FastAPI, methods_of: Mapping[str, Set[str]]) -> None:
    @app.exception_handler(DragomanError)
    async def on_purpose(request: Request, error: DragomanError) -> Response:
        return error_response(error, Dialect.of(request.url.path))

    @app.exception_handler(HTTPException)
    async def by_router(request: Request, error: HTTPException) -> Response:
        methods = methods_of.get(request.url.path, frozenset())
        return http_exception_response(error, Dialect.of(request.url.path), methods=methods)

    @app.exception_handler(RequestValidationError)
    async def by_schema(request: Request, _error: RequestValidationError) -> Response:
        error = InvalidRequest("a parameter is missing or of the wrong type; see /docs")
        return error_response(error, Dialect.of(request.url.path))

    @app.exception_handler(ClientDisconnect)
    async def left_while_sending(request: Request, _error: ClientDisconnect) -> Response:
        error = RequestCancelled("the client closed the connection while it sent its body")
        return error_response(error, Dialect.of(request.url.path))
