"""What `benchmarks.agreement` asks both engines for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.decoding.guidance import Guidance
from app.decoding.options import DecodingOptions


@dataclass(frozen=True)
class Known:
    """What a sentence's guidance may be made from.

    Attributes:
        id_of: token ids, by piece.
        greedy: our greedy translation of the sentence, unguided.
        other_greedy: that of another sentence.
    """

    id_of: Mapping[str, int]
    greedy: tuple[int, ...]
    other_greedy: tuple[int, ...]


Guide = Callable[[Known], Guidance]
"""What is asked of one sentence's target; only the prefix may depend on the sentence."""


@dataclass(frozen=True)
class Setting:
    """What both sides are asked for; another option is compared by adding a setting to `SETTINGS`.

    Attributes:
        name: shown in the table.
        ours: our options.
        theirs: the same as keyword arguments of ``ctranslate2.Translator.translate_batch``.
        guide: what is asked of each target on both sides, or None.
    """

    name: str
    ours: DecodingOptions
    theirs: Mapping[str, Any] = field(default_factory=dict)
    guide: Guide | None = None


def _beams(name: str, beam_size: int, num_hypotheses: int = 1, **changes: float) -> Setting:
    """A setting whose options have the same names on both sides."""
    return Setting(
        name,
        DecodingOptions(beam_size=beam_size, num_hypotheses=num_hypotheses, **changes),  # type: ignore[arg-type]
        {"beam_size": beam_size, "num_hypotheses": num_hypotheses, **changes},
    )


def _guided(name: str, guide: Guide) -> tuple[Setting, Setting]:
    return (
        Setting(f"greedy, {name}", DecodingOptions(), {"beam_size": 1}, guide),
        replace(_beams(f"beam 4, {name}", 4), guide=guide),
    )


def _forbidding(known: Known) -> Guidance:
    """Three of the commonest tokens, and a pair."""
    phrases = (("▁de",), ("▁a",), (",",), ("▁que", "▁o"))
    return Guidance(forbidden=tuple(tuple(known.id_of[piece] for piece in phrase) for phrase in phrases))


def _everything(known: Known) -> Guidance:
    return replace(
        _forbidding(known),
        min_target_tokens=41,
        no_repeat_ngram_size=2,
        repetition_penalty=1.3,
        prefix=known.other_greedy[:3],
    )


SETTINGS: Sequence[Setting] = (
    Setting("greedy", DecodingOptions(), {"beam_size": 1}),
    _beams("beam 4", 4),
    _beams("beam 4, 4 hypotheses", 4, 4),
    _beams("beam 4, 4 hypotheses, length penalty 0", 4, 4, length_penalty=0.0),
    _beams("beam 4, length penalty 0", 4, length_penalty=0.0),
    _beams("beam 4, 4 hypotheses, length penalty 0.6", 4, 4, length_penalty=0.6),
    _beams("beam 4, 4 hypotheses, length penalty 2", 4, 4, length_penalty=2.0),
    _beams("beam 4, 4 hypotheses, patience 2", 4, 4, patience=2.0),
    _beams("beam 3, 2 hypotheses, patience 1.5, length penalty 0.6", 3, 2, patience=1.5, length_penalty=0.6),
    _beams("beam 8, 8 hypotheses", 8, 8),
    *_guided("at least 41 tokens", lambda _: Guidance(min_target_tokens=41)),
    *_guided("no token twice", lambda _: Guidance(no_repeat_ngram_size=1)),
    *_guided("no pair of tokens twice", lambda _: Guidance(no_repeat_ngram_size=2)),
    *_guided("repetition penalty 1.3", lambda _: Guidance(repetition_penalty=1.3)),
    *_guided("forbidden tokens and a pair", _forbidding),
    *_guided("prefix of the greedy translation", lambda known: Guidance(prefix=known.greedy[:3])),
    *_guided("prefix of another translation", lambda known: Guidance(prefix=known.other_greedy[:3])),
    *_guided("everything but attention", _everything),
    *_guided("attention", lambda _: Guidance(keeps_attention=True)),
)
