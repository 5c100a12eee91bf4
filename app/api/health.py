"""Probes and metrics: what load balancers, orchestrators and Prometheus ask."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response

from app.api.engine_protocol import TranslationEngine
from app.api.options import ApiOptions
from app.observability import Metrics


class HealthAnswer(BaseModel):
    """One word."""

    status: str = Field(description="ok, starting, stuck or draining.")


LIVE_PATHS = ("/livez", "/v2/health/live")
READY_PATHS = ("/readyz", "/v2/health/ready", "/health")
STARTUP_PATH = "/startupz"
_RESPONSES: dict[int | str, dict[str, Any]] = {503: {"model": HealthAnswer, "description": "Not so."}}


def health_router(engine: TranslationEngine, options: ApiOptions, metrics: Metrics) -> APIRouter:
    """The probes over an engine.

    * Startup: every model is loaded and has translated a canary on every worker; stays so for good.
    * Readiness: started, every worker gave a recent sign of life, and the service is not draining.
    * Liveness: the event loop answers. A worker that fails is replaced by the service itself, and when that
      does not help the process ends by itself, so there is nothing a restart from outside would add.
    """
    router = APIRouter(tags=["operation"])

    async def live() -> Response:
        """Whether the event loop answers: it did, to say so."""
        return JSONResponse({"status": "ok"})

    async def started() -> Response:
        """Whether every model has translated something on every worker since the process began."""
        return _answer(None if engine.started else "starting")

    async def ready() -> Response:
        """Whether to send requests here."""
        if engine.draining:
            return _answer("draining")
        if not engine.started:
            return _answer("starting")
        healthy = engine.healthy(max_heartbeat_age_s=options.max_heartbeat_age_s)
        return _answer(None if healthy else "stuck")

    probes = [
        *((path, live, "Liveness") for path in LIVE_PATHS),
        *((path, ready, "Readiness") for path in READY_PATHS),
        (STARTUP_PATH, started, "Startup"),
    ]
    for path, endpoint, summary in probes:
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
        router.add_api_route(
            path,
            endpoint,
            methods=["GET"],
            response_model=HealthAnswer,
            responses=_RESPONSES if endpoint is not live else None,
            summary=summary
            if path in (LIVE_PATHS[0], READY_PATHS[0], STARTUP_PATH)
            else f"{summary} (alias)",
        )

    @router.get("/metrics", response_class=Response, summary="Prometheus metrics")
    async def prometheus() -> Response:
        """All metrics in Prometheus' text format."""
        return Response(metrics.exposition(), headers={"Content-Type": metrics.content_type})

    return router


def _answer(fault: str | None) -> Response:
    return JSONResponse({"status": fault or "ok"}, status_code=503 if fault else 200)
