"""LibreTranslate's dialect at the root: POST /translate and GET /languages.

Written from the public description of the wire format. Where this service does less it says so in an
error instead of answering something else: no detection (``source: auto``), no HTML.
``api_key`` and fields this service does not know are accepted and ignored, because this dialect's
clients send fields of several versions of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from app.api.body import is_json, media_type_of, read_form, read_json_object, read_multipart, read_query
from app.api.disconnect import while_connected
from app.api.engine_protocol import TranslationEngine
from app.api.errors import MalformedBody, UnsupportedMediaType
from app.api.languages import LanguageTable, checked_code, language_name
from app.api.options import ApiOptions
from app.api.schemas import LanguageCode
from app.decoding.options import MAX_BEAM_SIZE, DecodingOptions
from app.errors import InvalidOption, InvalidRequest, RequestTooLarge, UnsupportedPair
from app.runtime.request import PairInfo, TranslationRequest, TranslationResult

_FORM = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"
MAX_ALTERNATIVES = MAX_BEAM_SIZE - 1
_MIN_BEAM_SIZE = 4
"""With alternatives at least this many beams are searched: two beams find poor second translations."""


_WRITTEN_ALTERNATIVES = {"type": "string", "enum": ["", *map(str, range(MAX_ALTERNATIVES + 1))]}
_Format = Literal["text", ""]
_Alternatives = (
    Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | Annotated[str, WithJsonSchema(_WRITTEN_ALTERNATIVES)]
)
_FORMAT_MEANING = "text; html is refused."
_ALTERNATIVES_MEANING = "Further translations wanted of each text."


class _CommonFields(BaseModel):
    source: LanguageCode = Field(description="Language code; auto is refused, there is no detection.")
    target: LanguageCode = Field(description="Language code.")
    api_key: Any = Field(
        default="", description="A key of this service, a string; docs/security.md has other ways."
    )


class LibreTranslateForm(_CommonFields):
    """What clients send as a form or in the query string; fields this service does not know are ignored."""

    q: str = Field(description="Text; CR and CRLF become LF.")
    format: _Format = Field(default="text", description=_FORMAT_MEANING)
    alternatives: _Alternatives = Field(default=0, description=_ALTERNATIVES_MEANING)


class LibreTranslateBody(_CommonFields):
    """What clients send as JSON; fields this service does not know are ignored."""

    q: str | list[str] = Field(description="Text, or an array of texts.")
    format: _Format | None = Field(default="text", description=_FORMAT_MEANING)
    alternatives: _Alternatives | None = Field(default=0, description=_ALTERNATIVES_MEANING)


class LibreTranslateAnswer(BaseModel):
    """The translation, in the shape of ``q``."""

    model_config = ConfigDict(json_schema_extra={"example": {"translatedText": "Bom dia."}})

    translatedText: str | list[str] = Field(description="A string for a string, an array for an array.")  # noqa: N815
    alternatives: list[str] | list[list[str]] | None = Field(
        default=None, description="Only when asked for: best first; an array of arrays for an array."
    )


class LibreTranslateLanguage(BaseModel):
    """A language and what it can be translated to."""

    code: str
    name: str
    targets: list[str]


class LibreTranslateError(BaseModel):
    """Every error outside /v1."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"error": "xx is not supported; available targets from en: pt"}}
    )

    error: str = Field(description="The value, the limit and the remedy, for people.")


WARNINGS_HEADER = "X-Dragoman-Warnings"
_WARNINGS_HEADERS = {
    WARNINGS_HEADER: {
        "description": "Only if there are any: codes of warnings, as /v1/translate explains them, with the "
        "number of segments each concerns.",
        "schema": {"type": "string"},
        "example": "target_truncated;count=1, unknown_characters;count=2",
    }
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {
        "model": LibreTranslateError,
        "description": "A field is missing or wrong, or a limit is exceeded.",
    },
    408: {"model": LibreTranslateError, "description": "The body took too long to arrive."},
    413: {"model": LibreTranslateError, "description": "The body exceeds the limit on bytes."},
    415: {"model": LibreTranslateError, "description": "The body's content type is not read."},
    429: {"model": LibreTranslateError, "description": "Too much work is waiting; see Retry-After."},
    500: {
        "model": LibreTranslateError,
        "description": "A fault of the service; the log has it by request id.",
    },
    503: {"model": LibreTranslateError, "description": "The service is stopping, or a step failed."},
}
_SCHEMA = {"$ref": "#/components/schemas/LibreTranslateBody"}
_FORM_SCHEMA = {"$ref": "#/components/schemas/LibreTranslateForm"}
_EXAMPLE = {"q": "Good morning.", "source": "en", "target": "pt", "format": "text"}


@dataclass(frozen=True)
class _Fields:
    """A request's fields with the types still unchecked."""

    values: dict[str, object]

    def required(self, name: str) -> object:
        value = self.values.get(name)
        if value is None or (value == "" and name != "q"):
            raise InvalidRequest(f"Invalid request: missing {name} parameter")
        return value

    def code(self, name: str) -> str:
        value = self.required(name)
        if not isinstance(value, str):
            raise InvalidRequest(f"Invalid request: {name} must be a string")
        return checked_code(value, name)


def libretranslate_router(
    engine: TranslationEngine, languages: LanguageTable, options: ApiOptions
) -> APIRouter:
    """LibreTranslate's routes over an engine."""
    router = APIRouter(tags=["libretranslate"])
    large_forms = asyncio.Lock()

    @router.post(
        "/translate",
        response_model=LibreTranslateAnswer,
        response_model_exclude_none=True,
        responses={200: {"headers": _WARNINGS_HEADERS}, **_ERRORS},
        summary="Translate, LibreTranslate's way",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {"schema": _SCHEMA, "example": _EXAMPLE},
                    _FORM: {"schema": _FORM_SCHEMA},
                    _MULTIPART: {"schema": _FORM_SCHEMA},
                },
            }
        },
    )
    async def translate(request: Request, response: Response) -> LibreTranslateAnswer:
        """Translate a text or an array of texts; the answer has the shape of the question."""
        fields = await _read_fields(request, large_forms)
        q = fields.required("q")
        texts = _texts(q, options)
        _check_format(fields)
        num_alternatives = _num_alternatives(fields)
        pair = _pair(languages, source=fields.code("source"), target=fields.code("target"))
        decoding = _decoding_options(num_alternatives)
        work = engine.translate(TranslationRequest(texts, pair.source, pair.target, decoding))
        result = await while_connected(request, work)
        if warnings := _warnings(result):
            response.headers[WARNINGS_HEADER] = warnings
        translated = [text.text for text in result.texts]
        answer = LibreTranslateAnswer(translatedText=translated if isinstance(q, list) else translated[0])
        if not num_alternatives:
            return answer
        alternatives = [list(text.alternatives[:num_alternatives]) for text in result.texts]
        return answer.model_copy(
            update={"alternatives": alternatives if isinstance(q, list) else alternatives[0]}
        )

    @router.get("/languages", response_model=list[LibreTranslateLanguage], summary="List the languages")
    async def list_languages() -> list[LibreTranslateLanguage]:
        """List every language of a loaded pair; one that is only a target has no targets itself."""
        return [
            LibreTranslateLanguage(
                code=code, name=language_name(code), targets=list(languages.targets_of(code))
            )
            for code in languages.codes
        ]

    return router


async def _read_fields(request: Request, large_forms: asyncio.Lock) -> _Fields:
    media_type = media_type_of(request)
    if is_json(media_type):
        return _Fields(await read_json_object(request))
    if media_type in (_FORM, "") and (await request.body()).lstrip().startswith(b"{"):
        # What curl sends for -d '{...}' without -H; no form has a field that begins so.
        raise MalformedBody(
            "Invalid request: the body looks like JSON, but the header Content-Type: application/json "
            "is missing"
        )
    if media_type == _FORM:
        form = await read_form(request, large_forms=large_forms)
    elif media_type == _MULTIPART:
        form = await read_multipart(request)
    elif media_type == "":
        form = []
    else:
        raise UnsupportedMediaType(f"Invalid request: send the body as application/json or {_FORM}")
    values: dict[str, object] = {}
    for fields in (form, read_query(request)):
        named = [name for name, _ in fields]
        if named.count("q") > 1:
            raise InvalidRequest(
                f"Invalid request: q is given {named.count('q')} times; send an array in JSON"
            )
        for name, value in fields:
            values.setdefault(name, value)
    if isinstance(q := values.get("q"), str):
        # Forms carry CRLF whatever the author typed; this dialect's services hand back LF.
        values["q"] = q.replace("\r\n", "\n").replace("\r", "\n")
    return _Fields(values)


def _texts(q: object, options: ApiOptions) -> tuple[str, ...]:
    if isinstance(q, str):
        texts: tuple[str, ...] = (q,)
    elif isinstance(q, list) and all(isinstance(item, str) for item in q):
        texts = tuple(q)
    else:
        raise InvalidRequest("Invalid request: q must be a string or an array of strings")
    if len(texts) > options.max_texts:
        raise RequestTooLarge(
            f"Invalid request: request ({len(texts)}) exceeds batch limit ({options.max_texts})"
        )
    if (num_characters := sum(map(len, texts))) > options.max_text_characters:
        raise RequestTooLarge(
            f"Invalid request: request ({num_characters}) exceeds text limit ({options.max_text_characters})"
        )
    return texts


def _warnings(result: TranslationResult) -> str:
    """How many warnings of which code, since this dialect's answer has no place for them."""
    counts = Counter(warning.code.value for text in result.texts for warning in text.warnings)
    return ", ".join(f"{code};count={counts[code]}" for code in sorted(counts))


def _check_format(fields: _Fields) -> None:
    value = fields.values.get("format")
    if value in (None, "", "text"):
        return
    if value == "html":
        raise InvalidOption("html format is not supported yet; send format text")
    raise InvalidOption("this format is not supported; send format text")


def _decoding_options(num_alternatives: int) -> DecodingOptions:
    """Greedy search, unless alternatives are wanted: they are the other beams."""
    if not num_alternatives:
        return DecodingOptions()
    return DecodingOptions(
        beam_size=max(_MIN_BEAM_SIZE, num_alternatives + 1), num_hypotheses=num_alternatives + 1
    )


def _num_alternatives(fields: _Fields) -> int:
    value = fields.values.get("alternatives")
    if value in (None, ""):
        return 0
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and value.isascii() and value.lstrip("+-").isdigit()):
        raise InvalidOption("Invalid request: alternatives parameter is not a number")
    text = str(value)
    digits = text.lstrip("+-0")
    if digits == "":
        return 0
    if text.startswith("-"):
        raise InvalidOption("Invalid request: alternatives parameter must not be negative; send 0")
    if len(digits) > 2 or int(digits) > MAX_ALTERNATIVES:
        raise InvalidOption(f"Invalid request: alternatives parameter must be <= {MAX_ALTERNATIVES}")
    return int(digits)


def _pair(languages: LanguageTable, *, source: str, target: str) -> PairInfo:
    languages.refuse_detection(source)
    found_source = languages.find(source)
    if found_source is None:
        raise UnsupportedPair(f"{source} is not supported; available sources: {_listed(languages.sources)}")
    targets = f"available targets from {found_source}: {_listed(languages.targets_of(found_source))}"
    found_target = languages.find(target)
    if found_target is None:
        raise UnsupportedPair(f"{target} is not supported; {targets}")
    pair = languages.pair(found_source, found_target)
    if pair is None:
        raise UnsupportedPair(
            f"{language_name(found_target)} ({found_target}) is not available as a target language from "
            f"{language_name(found_source)} ({found_source}); {targets}"
        )
    return pair


def _listed(codes: Sequence[str]) -> str:
    return ", ".join(codes) or "none"
