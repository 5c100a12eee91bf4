"""Reading bodies strictly, without ever repeating what they hold."""

from __future__ import annotations

import asyncio
import codecs
import re
from typing import TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from app.api.errors import MalformedBody, UnsupportedMediaType
from app.api.forms import Fields, parse_multipart, parse_urlencoded
from app.errors import InvalidRequest, RequestTooLarge

M = TypeVar("M", bound=BaseModel)
_MAX_FAULTS_NAMED = 3
_MAX_STRUCTURES = 1000
_MAX_UNCOUNTED_JSON_BYTES = 64 * 1024
_MAX_INLINE_FORM_BYTES = 64 * 1024
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
        RequestTooLarge: it has far more structure than any body here needs.
        InvalidRequest: a field is missing, unknown or of the wrong type.
    """
    if not is_json(media_type_of(request)):
        raise UnsupportedMediaType("the body must be JSON; send the header Content-Type: application/json")
    try:
        # The models refuse numbers that are none by the field's name.
        document = _from_json(await request.body(), allow_inf_nan=True)
    except ValueError as error:
        raise MalformedBody(f"Invalid JSON: {error}; the body must be a JSON object in UTF-8") from None
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # The validation error is not chained: it holds the input.
        raise _named_faults(error) from None


async def read_json_object(request: Request) -> dict[str, object]:
    """Read a JSON body that must be an object.

    Raises:
        MalformedBody: it is not JSON in UTF-8, or no object.
        RequestTooLarge: it has far more structure than any body here needs.
    """
    try:
        document = _from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise MalformedBody(f"Invalid JSON format: {error}") from None
    if not isinstance(document, dict):
        raise MalformedBody("Invalid JSON format: the body must be an object")
    return document


async def read_form(request: Request, *, large_forms: asyncio.Lock) -> Fields:
    """Fields of a URL-encoded body, in order.

    Args:
        request: its body may have been read.
        large_forms: held while a large form is parsed beside the loop. Several such threads would only
            take turns, and each would take the loop's turns.

    Raises:
        RequestTooLarge: it has too many fields.
        MalformedBody: a field is not UTF-8.
    """
    raw = await request.body()
    if len(raw) <= _MAX_INLINE_FORM_BYTES:
        return parse_urlencoded(raw)
    # Undoing percent encoding runs in Python, 0.2 s a megabyte; beside the loop the loop goes on.
    async with large_forms:
        return await asyncio.to_thread(parse_urlencoded, raw)


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

    Raises:
        RequestTooLarge: it has far more structure than any body here needs.
        ValueError: it is not JSON in UTF-8; the message does not repeat it.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if len(raw) > _MAX_UNCOUNTED_JSON_BYTES and (count := _num_structures(raw)) > _MAX_STRUCTURES:
        # The parser holds the interpreter's lock to its end in whichever thread it runs, and hundreds of
        # thousands of objects take it longest. Numbers and strings alone are quick.
        raise RequestTooLarge(
            f"Invalid request: the JSON has {count} objects, arrays and fields, the limit is "
            f"{_MAX_STRUCTURES}; send the texts as strings of one array"
        )
    return pydantic_core.from_json(raw, allow_inf_nan=allow_inf_nan, cache_strings="none")


def _num_structures(raw: bytes) -> int:
    """How many objects, arrays and members a JSON document has, without parsing it."""

    def counted(piece: bytes) -> int:
        return piece.count(b"[") + piece.count(b"{") + piece.count(b":")

    if (at_most := counted(raw)) <= _MAX_STRUCTURES:
        return at_most
    # Backslashes occur in strings alone; without the escaped ones, every second piece is a string.
    pieces = raw.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    return counted(b"".join(pieces[::2]))


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
