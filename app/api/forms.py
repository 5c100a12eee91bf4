"""Forms, URL-encoded and multipart: strict, linear in their size, bounded in their numbers.

Every search for a delimiter runs in C over the whole body, so that a body built to be slow is not: general
parsers of mail and of streams walk some delimiters byte by byte. What is read is RFC 7578; what it forbids
or deprecates (nested parts, transfer encodings, boundaries over 70 characters) is refused.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from app.api.errors import MalformedBody
from app.errors import RequestTooLarge

MAX_FIELDS = 64
"""Most fields of a form or a query string, and most parts of a multipart body."""

_UNQUOTED_BYTES = 16 * 1024
_MAX_PART_HEADERS = 8
_MAX_PART_HEAD_BYTES = 4096
_MAX_BOUNDARY_CHARACTERS = 70  # RFC 2046, section 5.1.1
_PARAMETER = re.compile(
    r"""[ \t]*;[ \t]*([!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*+)"|([^";\s]*+))[ \t]*""",
    re.DOTALL,
)
_PLAIN_ENCODINGS = frozenset({"7bit", "8bit", "binary"})

Fields = list[tuple[str, str]]
"""Names and values, in the order of the form."""


def parse_urlencoded(raw: bytes) -> Fields:
    """Fields of a URL-encoded body or a query string.

    Raises:
        RequestTooLarge: it has more than `MAX_FIELDS` fields.
        MalformedBody: a field is not UTF-8.
    """
    _check_number(raw.count(b"&") + 1)
    return [
        (_unquoted(name), _unquoted(value))
        for name, _, value in (pair.partition(b"=") for pair in raw.split(b"&") if pair)
    ]


def _unquoted(raw: bytes) -> str:
    """Undo percent encoding, piece by piece: one call for all would hold the interpreter's lock for long."""
    raw = raw.replace(b"+", b" ")
    decoded = bytearray()
    start = 0
    while start < len(raw):
        end = start + _UNQUOTED_BYTES
        # An escape is not cut in two.
        cut = raw.find(b"%", end - 2, end)
        end = end if cut < 0 else cut
        decoded += unquote_to_bytes(raw[start:end])
        start = end
    return _utf8(bytes(decoded))


def parse_multipart(raw: bytes, *, content_type: str) -> Fields:
    """Fields of a multipart/form-data body; attached files are no fields.

    Args:
        raw: the body.
        content_type: the header's value, with the boundary.

    Raises:
        RequestTooLarge: it has more than `MAX_FIELDS` parts.
        MalformedBody: it is cut off, nested, encoded, or a field has no name or is not UTF-8.
    """
    boundary = _parameters(content_type).get("boundary", "")
    if not 0 < len(boundary) <= _MAX_BOUNDARY_CHARACTERS:
        raise MalformedBody(
            "Invalid request: the multipart body needs a boundary of 1 to "
            f"{_MAX_BOUNDARY_CHARACTERS} characters"
        )
    delimiter = b"\r\n--" + boundary.encode("latin-1")
    before, *sections = (b"\r\n" + raw).split(delimiter, MAX_FIELDS + 1)
    if before.strip(b"\r\n") or not sections:
        raise MalformedBody("Invalid request: the multipart body does not begin with its boundary")
    fields: Fields = []
    for index, section in enumerate(sections):
        if section.startswith(b"--"):
            # What follows the last delimiter is to be ignored (RFC 2046, section 5.1.1).
            return fields
        if index == MAX_FIELDS:
            # The last section holds all that was not split.
            num_more = section.count(delimiter) - section.count(delimiter + b"--")
            _check_number(MAX_FIELDS + 1 + num_more)
        fields += _fields_of_part(section)
    raise MalformedBody("Invalid request: the multipart body is cut off before its last boundary")


def _fields_of_part(section: bytes) -> Fields:
    """A part's field, from the end of its delimiter to the start of the next; none for a file."""
    end = section.find(b"\r\n\r\n", 0, _MAX_PART_HEAD_BYTES)
    if end < 0:
        raise MalformedBody(
            "Invalid request: a part of the multipart body has no head, or one of more than "
            f"{_MAX_PART_HEAD_BYTES} bytes"
        )
    padding, *lines = section[:end].split(b"\r\n", _MAX_PART_HEADERS + 1)
    if padding.strip(b" \t") or len(lines) > _MAX_PART_HEADERS:
        raise MalformedBody(
            "Invalid request: a part of the multipart body is damaged or has more than "
            f"{_MAX_PART_HEADERS} headers"
        )
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = _utf8(line).partition(":")
        if not colon:
            raise MalformedBody("Invalid request: a header in the multipart body is damaged")
        headers[name.strip(" \t").lower()] = value.strip(" \t")
    if headers.get("content-type", "").lower().startswith(("multipart/", "message/")):
        raise MalformedBody("Invalid request: a part of the multipart body is nested; send plain fields")
    if headers.get("content-transfer-encoding", "8bit").lower() not in _PLAIN_ENCODINGS:
        raise MalformedBody("Invalid request: a part of the multipart body is encoded; send it as it is")
    parameters = _parameters(headers.get("content-disposition", ""))
    if "name" not in parameters:
        raise MalformedBody("Invalid request: a part of the multipart body has no name")
    if "filename" in parameters or "filename*" in parameters:
        return []
    return [(parameters["name"], _utf8(section[end + 4 :]))]


def _parameters(header: str) -> dict[str, str]:
    """The parameters of a header's value, names in lower case; the first of each name."""
    header = header.rstrip("; \t")
    position = header.find(";")
    parameters: dict[str, str] = {}
    while 0 <= position < len(header):
        match = _PARAMETER.match(header, position)
        if match is None:
            # Reading on would guess, and might take a file for a field.
            raise MalformedBody("Invalid request: a parameter of a multipart header is damaged")
        name, quoted, plain = match.groups()
        value = plain if quoted is None else re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL)
        parameters.setdefault(name.lower(), value)
        position = match.end()
    return parameters


def _check_number(num_fields: int) -> None:
    if num_fields > MAX_FIELDS:
        raise RequestTooLarge(
            f"Invalid request: the form has {num_fields} fields, the limit is {MAX_FIELDS}; "
            "send several texts as an array in JSON"
        )


def _utf8(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise MalformedBody("Invalid request: the fields must be UTF-8") from None
