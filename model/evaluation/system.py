"""What can be evaluated: anything with a name that translates a test set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from model.evaluation.measures import Speed
from model.evaluation.testset import TestSet

DEFAULT_BEAM_SIZE = 1
DEFAULT_LENGTH_PENALTY = 1.0


@dataclass(frozen=True)
class Decoding:
    """How a system searches.

    Attributes:
        beam_size: live beams; 1 is greedy search.
        length_penalty: exponent of the score's length normalisation.
    """

    beam_size: int = DEFAULT_BEAM_SIZE
    length_penalty: float = DEFAULT_LENGTH_PENALTY


@dataclass(frozen=True)
class Languages:
    """The direction of an evaluation, as BCP-47 codes."""

    source: str
    target: str


@dataclass(frozen=True)
class Translations:
    """One system's answer.

    Attributes:
        lines: one for each source line.
        speed: None where nobody measured it.
    """

    lines: tuple[str, ...]
    speed: Speed | None


class System(Protocol):
    """A system under evaluation."""

    @property
    def name(self) -> str:
        """Unique in an evaluation, of the form of `testset.NAME_PATTERN`."""
        ...

    @property
    def facts(self) -> dict[str, object]:
        """What it is and how it was run, for the JSON."""
        ...

    def check(self, testset: TestSet) -> None:
        """Refuse, before any work, a test set that it cannot answer.

        Raises:
            DragomanError: as said.
        """
        ...

    def translate(self, testset: TestSet) -> Translations:
        """Translate the sources.

        Raises:
            DragomanError: it could not, for a reason the message names.
        """
        ...
