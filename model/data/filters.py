"""Which pairs are not fit to learn from; the first rule that rejects a pair is named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from model.data.exclusions import Exclusions
from model.data.filter_counts import FilterCounts, SourceCounts
from model.data.language import LanguageProbability
from model.data.placeholders import placeholders
from model.data.scripts import ScriptShare
from model.data.seen import SeenTexts

# In the order in which they are tried: the slow ones see only what the others leave.
Rule = Literal[
    "empty",
    "excluded",
    "characters",
    "length-ratio",
    "copied",
    "placeholders",
    "script",
    "duplicate",
    "language",
]
RULES: tuple[Rule, ...] = get_args(Rule)
KEPT = "kept"
Check = Callable[[str, str], bool]
Judge = Callable[[str], float]
_NO_LETTERS = re.compile(r"[\W\d_]+")


class FilterConfig(BaseModel):
    """``[data.filters]`` of a training configuration.

    Attributes:
        off: rules that are not to be applied.
        max_characters: rule `characters`: a side with more is rejected.
        max_length_ratio: rule `length-ratio`: a side may have so many times the other's characters, and
            `length_slack_characters` more. Between Chinese or Japanese and a language with an alphabet, 3.0
            is too strict.
        length_slack_characters: what lets short texts differ more.
        min_script_share: rule `script`: least share of a side's letters in its language's script.
        max_copied_letters: rule `copied`: sides that are equal up to case and space, and have more letters,
            are rejected; names and numbers are copied rightly.
        min_language_letters: rule `language`: a side with fewer letters is not judged.
        min_language_probability: rule `language`: least probability of the side's language where another one
            is more probable.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    off: frozenset[Rule] = frozenset()
    max_characters: int = Field(default=1000, ge=1)
    max_length_ratio: float = Field(default=3.0, ge=1, allow_inf_nan=False)
    length_slack_characters: int = Field(default=15, ge=0)
    min_script_share: float = Field(default=0.5, ge=0, le=1)
    max_copied_letters: int = Field(default=20, ge=0)
    min_language_letters: int = Field(default=40, ge=1)
    min_language_probability: float = Field(default=0.05, ge=0, le=1)

    @field_serializer("off")
    def _in_order(self, off: frozenset[Rule]) -> list[Rule]:
        """A set has another order in every process; what is written must not."""
        return sorted(off)


class PairFilter:
    """The rules of a configuration for one pair of languages. It remembers the pairs it kept.

    Args:
        config: the rules.
        source_language: BCP-47.
        target_language: BCP-47.
        exclusions: sentences that must not be trained on.
    """

    def __init__(
        self,
        config: FilterConfig,
        *,
        source_language: str,
        target_language: str,
        exclusions: Exclusions | None = None,
    ) -> None:
        """Prepare the rules.

        Raises:
            InvalidOption: the rule `language` is on and its library is not installed.
        """
        self._config = config
        self._exclusions = Exclusions() if exclusions is None else exclusions
        self._seen = SeenTexts()
        self._notes: list[str] = []
        languages = (source_language, target_language)
        scripts = [self._prepared("script", language, ScriptShare.of_language) for language in languages]
        probabilities = [
            self._prepared("language", language, LanguageProbability.of_language) for language in languages
        ]
        checks: dict[Rule, Check] = {
            "empty": _has_empty_side,
            "excluded": self._is_excluded,
            "characters": self._has_many_characters,
            "length-ratio": self._has_unequal_lengths,
            "copied": self._is_copied,
            "placeholders": _has_other_placeholders,
            "script": _either_side(scripts, self._is_in_another_script),
            "duplicate": self._is_known,
            "language": _either_side(probabilities, self._is_in_another_language),
        }
        self._checks = [(rule, checks[rule]) for rule in RULES if rule not in config.off]

    @property
    def notes(self) -> tuple[str, ...]:
        """What the rules that are on cannot judge, a sentence each."""
        return tuple(self._notes)

    def rejected_by(self, source: str, target: str) -> Rule | None:
        """The first rule that rejects a pair; None if it is kept, and then its like are duplicates."""
        for rule, is_unfit in self._checks:
            if is_unfit(source, target):
                return rule
        if "duplicate" not in self._config.off:
            self._seen.add(_pair_key(source, target))
        return None

    def kept(self, pairs: Iterable[tuple[str, str]], *, counter: Counter[str]) -> Iterator[tuple[str, str]]:
        """The pairs that no rule rejects, as they come.

        Args:
            pairs: of one source.
            counter: takes up how many each rule rejected, and under ``kept`` how many were kept.
        """
        for source, target in pairs:
            rule = self.rejected_by(source, target)
            counter[rule or KEPT] += 1
            if rule is None:
                yield source, target

    def _prepared(self, rule: Rule, language: str, judge_of: Callable[[str], Judge | None]) -> Judge | None:
        if rule in self._config.off:
            return None
        judge = judge_of(language)
        if judge is None:
            note = f"the rule `{rule}` does not know the language {language}: that side is not judged by it"
            self._notes.append(note)
        return judge

    def _is_excluded(self, source: str, target: str) -> bool:
        return self._exclusions.holds(source) or self._exclusions.holds(target)

    def _has_many_characters(self, source: str, target: str) -> bool:
        return max(len(source), len(target)) > self._config.max_characters

    def _has_unequal_lengths(self, source: str, target: str) -> bool:
        shorter, longer = sorted((len(source.strip()), len(target.strip())))
        return longer > self._config.max_length_ratio * shorter + self._config.length_slack_characters

    def _is_copied(self, source: str, target: str) -> bool:
        if len(source) <= self._config.max_copied_letters:
            return False
        folded = "".join(source.split()).casefold()
        if folded != "".join(target.split()).casefold():
            return False
        return len(_NO_LETTERS.sub("", folded)) > self._config.max_copied_letters

    def _is_in_another_script(self, text: str, share: Judge) -> bool:
        return share(text) < self._config.min_script_share

    def _is_known(self, source: str, target: str) -> bool:
        return _pair_key(source, target) in self._seen

    def _is_in_another_language(self, text: str, probability: Judge) -> bool:
        if len(text) < self._config.min_language_letters:
            return False
        if len(_NO_LETTERS.sub("", text)) < self._config.min_language_letters:
            return False
        return probability(text) < self._config.min_language_probability


def counts_of(name: str, counter: Mapping[str, int]) -> FilterCounts:
    """The counts of one source, from a counter that `PairFilter.kept` filled."""
    rejected = {rule: number for rule, number in counter.items() if rule != KEPT}
    return FilterCounts({name: SourceCounts(sum(counter.values()), rejected)})


def _either_side(judges: Sequence[Judge | None], is_unfit: Callable[[str, Judge], bool]) -> Check:
    """A check that looks at the sides that have a judge."""
    source_judge, target_judge = judges

    def check(source: str, target: str) -> bool:
        return (source_judge is not None and is_unfit(source, source_judge)) or (
            target_judge is not None and is_unfit(target, target_judge)
        )

    return check


def _has_empty_side(source: str, target: str) -> bool:
    return not (source.strip() and target.strip())


def _has_other_placeholders(source: str, target: str) -> bool:
    return placeholders(source) != placeholders(target)


def _pair_key(source: str, target: str) -> str:
    """Equal for pairs that differ in case and space alone."""
    return f"{' '.join(source.split())}\t{' '.join(target.split())}".casefold()
