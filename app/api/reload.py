"""POST /v1/reload: other models without a restart. What it does is in `app.runtime.reload`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from app.api.native import NATIVE_ERRORS
from app.api.schemas import ErrorAnswer
from app.errors import InvalidRequest
from app.runtime.reload import ReloadReport

Reload = Callable[[], Awaitable[ReloadReport]]
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}


class BundleChangeAnswer(BaseModel):
    """One bundle's part of a reload."""

    id: str = Field(description="Id of the bundle.")
    change: Literal["unchanged", "loaded", "removed"] = Field(
        description="unchanged: served before, with the same checksums; loaded: new, or another one under "
        "its id; removed: no longer there, and no longer served."
    )
    seconds: float = Field(description="How long it took to load; 0 where nothing was loaded.")


class ReloadAnswer(BaseModel):
    """What a reload did."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "bundles": [
                    {"id": "dragoman-en-pt", "change": "loaded", "seconds": 0.612},
                    {"id": "dragoman-pt-en", "change": "unchanged", "seconds": 0.0},
                ],
                "seconds": 0.731,
            }
        }
    )

    bundles: list[BundleChangeAnswer] = Field(description="Every bundle that was or is served, by id.")
    seconds: float = Field(description="From the call to when new requests took the new models.")


def reload_router(reload: Reload) -> APIRouter:
    """The route over what loads the bundles anew."""
    router = APIRouter(prefix="/v1", tags=["operation"])

    @router.post(
        "/reload",
        response_model=ReloadAnswer,
        responses={
            **{status: NATIVE_ERRORS[status] for status in (408, 413, 422)},
            409: {"model": ErrorAnswer, "description": "Another reload is running.", "headers": RETRY_AFTER},
            500: {
                "model": ErrorAnswer,
                "description": "A bundle is missing, damaged or cannot translate, or there is too little "
                "memory: the code says which, the message names it. The models that ran before go on.",
            },
            503: {"model": ErrorAnswer, "description": "The service is stopping.", "headers": RETRY_AFTER},
        },
        summary="Load the bundles anew",
    )
    async def load_anew(request: Request) -> ReloadAnswer:
        """Open the bundles again as at the start, prove those that changed, and only then serve them.

        Requests admitted before are finished by the models they began with. The body must be empty. Needs a
        key of scope admin; without keys, a caller on the service's own machine.
        """
        if await request.body():
            raise InvalidRequest("a reload takes no options; send an empty body")
        report = await reload()
        return ReloadAnswer(
            bundles=[
                BundleChangeAnswer(id=part.bundle, change=part.change.value, seconds=part.seconds)
                for part in report.changes
            ],
            seconds=report.seconds,
        )

    return router
