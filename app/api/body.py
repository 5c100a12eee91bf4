"""Reading bodies strictly, without ever repeating what they hold."""

from __future__ import annotations

import re
from email.parser import BytesParser
from email.policy import compat32
from typing import TypeVar
from urllib.parse import parse_qsl

import pydantic_core
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from app.api.errors import MalformedBody, UnsupportedMediaType
from app.errors import InvalidRequest

M = TypeVar("M", bound=BaseModel)
_MAX_FAULTS_NAMED = 3
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
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        # The validation error is not chained: it holds the input.
        raise _named_faults(error) from None


async def read_json_object(request: Request) -> dict[str, object]:
    """Read a JSON body that must be an object.

    Raises:
        MalformedBody: it is not JSON in UTF-8, or no object.
    """
    try:
        document = pydantic_core.from_json(await request.body(), allow_inf_nan=False)
    except ValueError as error:
        raise MalformedBody(f"Invalid JSON format: {error}") from None
    if not isinstance(document, dict):
        raise MalformedBody("Invalid JSON format: the body must be an object")
    return document


async def read_form(request: Request) -> list[tuple[str, str]]:
    """Fields of a URL-encoded body, in order.

    Raises:
        MalformedBody: a field is not UTF-8.
    """
    return _fields(await request.body())


async def read_multipart(request: Request) -> list[tuple[str, str]]:
    """Fields of a multipart/form-data body, in order; attached files are no fields.

    Raises:
        MalformedBody: it is cut off, nested, or a field is not UTF-8.
    """
    head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode("latin-1")
    message = BytesParser(policy=compat32).parsebytes(head + await request.body())
    if not message.is_multipart() or message.defects:
        raise MalformedBody("Invalid request: the multipart body is damaged or has no boundary")
    fields: list[tuple[str, str]] = []
    for part in message.walk():
        if part is message:
            continue
        raw = part.get_payload(decode=True)
        name = part.get_param("name", header="content-disposition")
        if not isinstance(raw, bytes) or not isinstance(name, str) or part.defects:
            raise MalformedBody("Invalid request: a part of the multipart body is damaged or has no name")
        if part.get_filename() is None:
            fields.append((name, _utf8(raw)))
    return fields


def read_query(request: Request) -> list[tuple[str, str]]:
    """Fields of the query string, in order.

    Raises:
        MalformedBody: a field is not UTF-8.
    """
    return _fields(request.scope["query_string"])


def _fields(raw: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(_utf8(raw), keep_blank_values=True, errors="strict")
    except ValueError:
        # It may hold the bytes, so it is not chained.
        raise MalformedBody("Invalid request: the fields must be percent-encoded UTF-8") from None


def _utf8(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise MalformedBody("Invalid request: the fields must be UTF-8") from None


def _named_faults(error: ValidationError) -> InvalidRequest:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    if faults[0]["type"] == "json_invalid":
        return MalformedBody(f"{faults[0]['msg']}; the body must be a JSON object in UTF-8")
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
