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

    status: str = Field(description="ok, draining or stuck.")


_RESPONSES: dict[int | str, dict[str, Any]] = {503: {"model": HealthAnswer, "description": "Not so."}}


def health_router(engine: TranslationEngine, options: ApiOptions, metrics: Metrics) -> APIRouter:
    """The probes over an engine.

    A worker that gives no sign of life never recovers by itself, so it fails liveness too: then, and
    only then, a restart helps. Draining fails readiness alone.
    """
    router = APIRouter(tags=["operation"])

    def answer(*, draining_fails: bool) -> Response:
        if not engine.healthy(max_heartbeat_age_s=options.max_heartbeat_age_s):
            return JSONResponse({"status": "stuck"}, status_code=503)
        if draining_fails and engine.draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        return JSONResponse({"status": "ok"})

    @router.head("/livez", include_in_schema=False)
    @router.get("/livez", response_model=HealthAnswer, responses=_RESPONSES, summary="Liveness")
    async def livez() -> Response:
        """Whether a restart would not help: the loop answers and every worker lives."""
        return answer(draining_fails=False)

    @router.head("/readyz", include_in_schema=False)
    @router.get("/readyz", response_model=HealthAnswer, responses=_RESPONSES, summary="Readiness")
    async def readyz() -> Response:
        """Whether to send requests here."""
        return answer(draining_fails=True)

    @router.head("/health", include_in_schema=False)
    @router.get(
        "/health",
        response_model=HealthAnswer,
        responses=_RESPONSES,
        summary="Readiness, LibreTranslate's way",
    )
    async def health() -> Response:
        """The same as /readyz, at LibreTranslate's path."""
        return answer(draining_fails=True)

    @router.get("/metrics", response_class=Response, summary="Prometheus metrics")
    async def prometheus() -> Response:
        """All metrics in Prometheus' text format."""
        return Response(metrics.exposition(), headers={"Content-Type": metrics.content_type})

    return router
