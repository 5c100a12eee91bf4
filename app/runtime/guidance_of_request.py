"""From what a request asks of its translations to what each segment's search is held to, in token ids.

Pure apart from the tokenizer.

*Forbidden phrases.* A phrase is forbidden where a word starts, in whatever pieces the model spells it: the
tokenizer's own spelling and the shortest others, up to `_MAX_SPELLINGS`. So words that begin with the phrase
and go on in further pieces are forbidden too ("cat" forbids "cats" when that is "cat" + "s"). Not covered:
other cases of the letters ("Cat"), and the phrase inside a word or right behind a bracket or quotation mark;
they may be listed as phrases of their own.

*Prefixes.* A prefix must come back byte for byte from the tokenizer. The model may go on within its last
word ("Bo" becomes "Bom"); a space at the end says that this word is complete, so that another one or the
end of the translation follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from app.decoding.guidance import Guidance
from app.errors import InvalidOption
from app.runtime.preparation import PreparedText
from app.runtime.request import TranslationRequest
from app.text import Tokenizer, check_text

_MAX_SPELLINGS = 32
"""Of one phrase. A five-letter word has 10 to 20, and a model hardly writes more pieces than it must."""
_MAX_SPELLINGS_IN_ALL = 1000
"""Of all phrases: each is compared with the target at every step of every beam."""


@dataclass(frozen=True)
class TargetPlan:
    """What one segment's target is held to.

    Attributes:
        max_target_tokens: its limit, end-of-sentence included.
        guidance: what else is asked, or None to leave the choice of tokens to the model.
    """

    max_target_tokens: int
    guidance: Guidance | None = None


def plan_targets(
    request: TranslationRequest,
    prepared: Sequence[PreparedText],
    *,
    tokenizer: Tokenizer,
    default_ratio: float,
    model_limit: int,
) -> list[TargetPlan]:
    """One plan for each segment of all texts, in their order.

    Args:
        request: what is asked.
        prepared: the request's texts.
        tokenizer: the model's.
        default_ratio: the bundle's ``max_target_ratio``.
        model_limit: the bundle's ``max_target_tokens``.

    Raises:
        InvalidOption: a phrase or a prefix cannot be spelled in the model's tokens, a prefix has no text to
            belong to or no room to go on, or contains what is forbidden.
    """
    spellings = forbidden_spellings(request.options.forbidden, tokenizer)
    forbidden = tuple(itertools.chain.from_iterable(spellings))
    shared: dict[int, Guidance] = {}
    plans: list[TargetPlan] = []
    for index, (text, given) in enumerate(zip(prepared, request.prefixes, strict=True)):
        prefix: tuple[int, ...] = ()
        if given:
            if not text.segments:
                raise InvalidOption(
                    f"target_prefixes[{index}] is not empty but texts[{index}] holds nothing to translate; "
                    "send an empty prefix with it"
                )
            prefix = prefix_ids(given, tokenizer, name=f"target_prefixes[{index}]")
            _check_allowed(prefix, spellings, index=index)
        for segment in text.segments:
            bounds = request.options.target_bounds(
                len(segment.source_ids), default_ratio=default_ratio, model_limit=model_limit
            )
            if len(prefix) >= bounds.max_tokens:
                raise InvalidOption(
                    f"target_prefixes[{index}] has {len(prefix)} tokens and the translation of its segment "
                    f"may have at most {bounds.max_tokens}, the end included; shorten the prefix, or raise "
                    f"max_target_tokens or max_target_ratio (this model's limit is {model_limit})"
                )
            if not (request.options.guides or prefix):
                plans.append(TargetPlan(bounds.max_tokens))
                continue
            # One object for all segments that are asked the same: it keeps a table of what is forbidden.
            guidance = None if prefix else shared.get(bounds.min_tokens)
            if guidance is None:
                guidance = Guidance(
                    min_target_tokens=bounds.min_tokens,
                    no_repeat_ngram_size=request.options.no_repeat_ngram_size,
                    repetition_penalty=request.options.repetition_penalty,
                    forbidden=forbidden,
                    prefix=prefix,
                    not_after_prefix=tokenizer.joining_ids if prefix and given.endswith(" ") else frozenset(),
                    keeps_attention=request.options.alignment,
                )
                if not prefix:
                    shared[bounds.min_tokens] = guidance
            plans.append(TargetPlan(bounds.max_tokens, guidance))
            prefix = ()  # it belongs to the text's first segment
    return plans


def forbidden_spellings(phrases: Sequence[str], tokenizer: Tokenizer) -> list[list[tuple[int, ...]]]:
    """For each phrase the token sequences that spell it.

    Raises:
        InvalidOption: names the phrase's index; no token spells it, or only the unknown one does.
    """
    limit = min(_MAX_SPELLINGS, _MAX_SPELLINGS_IN_ALL // max(1, len(phrases)))
    spellings = []
    for index, phrase in enumerate(phrases):
        found = tokenizer.spellings(phrase, limit=limit)
        if not found:
            raise InvalidOption(
                f"forbidden[{index}] holds no character that the model writes; leave it out or write a word"
            )
        if tokenizer.unknown_id in found[0]:
            raise InvalidOption(
                f"forbidden[{index}] has {tokenizer.unknown_characters(phrase)} characters that the model "
                "does not know and never writes; write it without them, or leave it out"
            )
        spellings.append(found)
    return spellings


def prefix_ids(prefix: str, tokenizer: Tokenizer, *, name: str) -> tuple[int, ...]:
    """The tokens of a target prefix, which is not empty; a space at its end is none of them.

    Args:
        prefix: what a translation is to start with.
        tokenizer: the model's.
        name: the field and the index, for the message.

    Raises:
        InvalidOption: the tokens would not give the prefix back.
    """
    check_text(prefix, name=name)
    *ids, _ = tokenizer.encode_source(prefix)
    if tokenizer.unknown_id in ids:
        raise InvalidOption(
            f"{name} has {tokenizer.unknown_characters(prefix)} characters that the model does not know; "
            "write it without them"
        )
    if not ids or tokenizer.decode(ids) != prefix.removesuffix(" "):
        raise InvalidOption(
            f"{name} cannot be written by the model as it is; use single spaces between words, none before "
            "the first, at most one behind the last, no line breaks and no compatibility characters, or "
            "send an empty one"
        )
    return tuple(ids)


def _check_allowed(
    prefix: tuple[int, ...], spellings: Sequence[Sequence[tuple[int, ...]]], *, index: int
) -> None:
    for number, spellings_of_phrase in enumerate(spellings):
        sizes = {len(spelling) for spelling in spellings_of_phrase}
        parts = {prefix[start : start + size] for size in sizes for start in range(len(prefix))}
        if not parts.isdisjoint(spellings_of_phrase):
            raise InvalidOption(
                f"target_prefixes[{index}] contains forbidden[{number}]; change the prefix or allow "
                "the phrase"
            )
