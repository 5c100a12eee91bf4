"""The native dialect: POST /v1/translate and GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from app.api.body import read_model
from app.api.disconnect import while_connected
from app.api.engine_protocol import TranslationEngine
from app.api.languages import LanguageTable
from app.api.options import ApiOptions
from app.api.schemas import (
    AlignmentAnswer,
    AlternativeAnswer,
    ErrorAnswer,
    ModelAnswer,
    ModelsAnswer,
    OptionsBody,
    SegmentAnswer,
    TextAnswer,
    TimingsAnswer,
    TranslateAnswer,
    TranslateBody,
    WarningAnswer,
)
from app.decoding.hypothesis import LengthNormalisation
from app.decoding.options import DecodingOptions
from app.errors import RequestTooLarge
from app.runtime.request import Alignment, TextResult, TranslationRequest

_MAX_ALIGNED_CHARACTERS = 20_000
"""A weight for each pair of tokens makes an answer a hundred times as long as its text, and while it is
written as JSON nobody else is served: 0.1 s for so many characters in usual sentences."""
_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
NATIVE_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The body is not a JSON object in UTF-8."},
    408: {"model": ErrorAnswer, "description": "The body took too long to arrive."},
    413: {"model": ErrorAnswer, "description": "The request exceeds a size limit."},
    415: {"model": ErrorAnswer, "description": "The body's content type is not JSON."},
    422: {"model": ErrorAnswer, "description": "A field is wrong, or the pair is not available."},
    429: {"model": ErrorAnswer, "description": "Too much work is waiting.", "headers": _RETRY_AFTER},
    500: {"model": ErrorAnswer, "description": "A fault of the service; the log has it by request id."},
    503: {
        "model": ErrorAnswer,
        "description": "The service is stopping, or a step failed.",
        "headers": _RETRY_AFTER,
    },
}


def native_router(engine: TranslationEngine, languages: LanguageTable, options: ApiOptions) -> APIRouter:
    """The native routes over an engine."""
    router = APIRouter(prefix="/v1", tags=["native"])

    @router.post(
        "/translate",
        response_model=TranslateAnswer,
        responses=NATIVE_ERRORS,
        summary="Translate texts",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/TranslateBody"}}},
            }
        },
    )
    async def translate(request: Request) -> Response:
        """Translate texts of one language pair; segments of all requests share the batches."""
        body = await read_model(request, TranslateBody)
        _check_size(body, options)
        pair = languages.resolve(body.source, body.target)
        work = engine.translate(
            TranslationRequest(
                tuple(body.texts),
                pair.source,
                pair.target,
                _decoding_options(body.options),
                target_prefixes=tuple(body.target_prefixes),
            )
        )
        result = await while_connected(request, work)
        answer = TranslateAnswer(
            texts=[_text_answer(text) for text in result.texts],
            source=pair.source,
            target=pair.target,
            model=result.model,
            timings=TimingsAnswer(
                total_s=result.timings.total_s,
                queue_s=result.timings.queue_s,
                decode_s=result.timings.decode_s,
            ),
        )
        # Written by pydantic in one go: the framework's way by dictionaries takes five times as long.
        return Response(answer.model_dump_json(), media_type="application/json")

    @router.get("/models", response_model=ModelsAnswer, summary="List the loaded models")
    async def models() -> ModelsAnswer:
        """List every loaded pair and the bundle that translates it."""
        return ModelsAnswer(
            models=[
                ModelAnswer(id=pair.model, source=pair.source, target=pair.target) for pair in engine.pairs
            ]
        )

    return router


def _decoding_options(body: OptionsBody) -> DecodingOptions:
    return DecodingOptions(
        max_target_tokens=body.max_target_tokens,
        max_target_ratio=body.max_target_ratio,
        min_target_tokens=body.min_target_tokens,
        min_target_ratio=body.min_target_ratio,
        beam_size=body.beam_size,
        num_hypotheses=body.num_hypotheses,
        length_penalty=body.length_penalty,
        normalisation=LengthNormalisation(body.normalisation),
        patience=body.patience,
        no_repeat_ngram_size=body.no_repeat_ngram_size,
        repetition_penalty=body.repetition_penalty,
        forbidden=tuple(body.forbidden),
        alignment=body.alignment,
    )


def _check_size(body: TranslateBody, options: ApiOptions) -> None:
    if len(body.texts) > options.max_texts:
        raise RequestTooLarge(
            f"the request has {len(body.texts)} texts, the limit is {options.max_texts}; "
            "send several requests"
        )
    num_characters = sum(map(len, (*body.texts, *body.target_prefixes)))
    if body.options.alignment and num_characters > _MAX_ALIGNED_CHARACTERS:
        raise RequestTooLarge(
            f"the texts and their prefixes have {num_characters} characters, the limit with alignment is "
            f"{_MAX_ALIGNED_CHARACTERS}; send several requests"
        )
    if num_characters > options.max_text_characters:
        raise RequestTooLarge(
            f"the texts and their prefixes have {num_characters} characters, the limit is "
            f"{options.max_text_characters}; send several requests"
        )


def _alignment_answer(alignment: Alignment) -> AlignmentAnswer:
    return AlignmentAnswer(
        source_tokens=list(alignment.source_tokens),
        target_tokens=list(alignment.target_tokens),
        weights=[list(row) for row in alignment.weights],
    )


def _text_answer(text: TextResult) -> TextAnswer:
    return TextAnswer(
        text=text.text,
        segments=[
            SegmentAnswer(
                source=segment.source,
                target=segment.target,
                num_source_tokens=segment.num_source_tokens,
                num_target_tokens=segment.num_target_tokens,
                score=segment.score,
                finish_reason=segment.finish_reason.value,
                alternatives=[
                    AlternativeAnswer(target=other.target, score=other.score)
                    for other in segment.alternatives
                ],
                alignment=None if segment.alignment is None else _alignment_answer(segment.alignment),
            )
            for segment in text.segments
        ],
        warnings=[
            WarningAnswer(code=warning.code.value, segment=warning.segment, message=warning.message)
            for warning in text.warnings
        ],
        alternatives=list(text.alternatives),
    )
