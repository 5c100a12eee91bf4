"""Reading bodies strictly, without ever repeating what they hold."""

from __future__ import annotations

import asyncio
import codecs
import gc
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from app.api.errors import MalformedBody, UnsupportedMediaType
from app.api.forms import Fields, parse_multipart, parse_urlencoded
from app.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)
_MAX_FAULTS_NAMED = 3
_MAX_MEMBERS = 64
_MAX_INLINE_FORM_BYTES = 64 * 1024
_large_forms = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-form")
"""One thread: several would only take turns, and each would take the loop's turns."""

_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", re.ASCII)


def media_type_of(request: Request) -> str:
    """The content type without parameters, in lower case; empty if there is none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def is_json(media_type: str) -> bool:
    """Whether a content type means JSON."""
    return media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )


async def read_model(request: Request, model: type[M]) -> M:
    """Read a JSON body into a strict model.

    Raises:
        UnsupportedMediaType: the content type is not JSON.
        MalformedBody: the body is not JSON in UTF-8.
        InvalidRequest: a field is missing, unknown or of the wrong type.
    """
    if not is_json(media_type_of(request)):
        raise UnsupportedMediaType("the body must be JSON; send the header Content-Type: application/json")
    try:
        # The models refuse numbers that are none by the field's name.
        document = _from_json(await request.body(), allow_inf_nan=True)
    except ValueError as error:
        raise MalformedBody(f"Invalid JSON: {error}; the body must be a JSON object in UTF-8") from None
    _check_widths(document)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # The validation error is not chained: it holds the input.
        raise _named_faults(error) from None


async def read_json_object(request: Request) -> dict[str, object]:
    """Read a JSON body that must be an object.

    Raises:
        MalformedBody: it is not JSON in UTF-8, or no object.
    """
    try:
        document = _from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise MalformedBody(f"Invalid JSON format: {error}") from None
    if not isinstance(document, dict):
        raise MalformedBody("Invalid JSON format: the body must be an object")
    return document


async def read_form(request: Request) -> Fields:
    """Fields of a URL-encoded body, in order.

    Raises:
        RequestTooLarge: it has too many fields.
        MalformedBody: a field is not UTF-8.
    """
    raw = await request.body()
    if len(raw) <= _MAX_INLINE_FORM_BYTES:
        return parse_urlencoded(raw)
    # Undoing percent encoding runs in Python, 0.2 s a megabyte; beside the loop the loop goes on.
    return await asyncio.get_running_loop().run_in_executor(_large_forms, parse_urlencoded, raw)


async def read_multipart(request: Request) -> Fields:
    """Fields of a multipart/form-data body, in order; attached files are no fields.

    Raises:
        RequestTooLarge: it has too many parts.
        MalformedBody: it is cut off, nested, or a field is not UTF-8.
    """
    return parse_multipart(await request.body(), content_type=request.headers["content-type"])


def read_query(request: Request) -> Fields:
    """Fields of the query string, in order.

    Raises:
        RequestTooLarge: it has too many fields.
        MalformedBody: a field is not UTF-8.
    """
    return parse_urlencoded(request.scope["query_string"])


def _from_json(raw: bytes, *, allow_inf_nan: bool) -> object:
    """Parse JSON, a byte order mark before it allowed, as RFC 8259 permits.

    The parser holds the interpreter's lock to its end, in whichever thread it runs. Passes of the garbage
    collector over hundreds of thousands of half-built lists would make it eight times slower.

    Raises:
        ValueError: it is not JSON in UTF-8; the message does not repeat it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return pydantic_core.from_json(
            raw.removeprefix(codecs.BOM_UTF8), allow_inf_nan=allow_inf_nan, cache_strings="none"
        )
    finally:
        if collecting:
            gc.enable()


def _check_widths(document: object) -> None:
    """Refuse objects with more members than any body here has, before each becomes a fault of its own."""
    if not isinstance(document, dict):
        return
    for part in (document, *document.values()):
        if isinstance(part, dict) and len(part) > _MAX_MEMBERS:
            raise InvalidRequest(
                f"an object has {len(part)} fields, the limit is {_MAX_MEMBERS}; send those in /docs"
            )


def _named_faults(error: ValidationError) -> InvalidRequest:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    named = "; ".join(f"{_location(fault['loc'])}: {fault['msg']}" for fault in faults[:_MAX_FAULTS_NAMED])
    more = "" if len(faults) <= _MAX_FAULTS_NAMED else f"; and {len(faults) - _MAX_FAULTS_NAMED} more"
    return InvalidRequest(f"{named}{more}; see /docs")


def _location(parts: tuple[int | str, ...]) -> str:
    """Where a fault lies; a key that does not look like a field's name may be text, and is not repeated."""
    shown = [
        str(part) if isinstance(part, int) or _FIELD_NAME.fullmatch(part) else "(unknown field)"
        for part in parts
    ]
    return ".".join(shown) or "the body"
