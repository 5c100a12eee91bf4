"""How many pairs each source had, how many were kept, and which rule took the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich.table import Table

from app.errors import InvalidOption


@dataclass(frozen=True)
class SourceCounts:
    """Of one source.

    Attributes:
        num_read: pairs that were looked at.
        num_rejected: rule -> pairs that it was the first to reject.
    """

    num_read: int = 0
    num_rejected: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_kept(self) -> int:
        """Pairs that no rule rejected."""
        return self.num_read - sum(self.num_rejected.values())

    def __add__(self, other: SourceCounts) -> SourceCounts:
        """Of both together."""
        return SourceCounts(
            self.num_read + other.num_read, dict(Counter(self.num_rejected) + Counter(other.num_rejected))
        )


@dataclass(frozen=True)
class FilterCounts:
    """Of all sources.

    Attributes:
        of_source: name of a source -> its counts.
    """

    of_source: Mapping[str, SourceCounts] = field(default_factory=dict)

    @property
    def total(self) -> SourceCounts:
        """Of all sources together."""
        return sum(self.of_source.values(), SourceCounts())

    def __add__(self, other: FilterCounts) -> FilterCounts:
        """Of both together; sources of one name are added up."""
        names = dict.fromkeys([*self.of_source, *other.of_source])
        none = SourceCounts()
        return FilterCounts(
            {name: self.of_source.get(name, none) + other.of_source.get(name, none) for name in names}
        )

    def table(self, rules: Iterable[str] = ()) -> Table:
        """For a terminal: a row for each source, a column for each rule that rejected anything.

        Args:
            rules: the order of the columns; rules that are not among them come last.
        """
        total = self.total
        order = dict.fromkeys([*rules, *sorted(total.num_rejected)])
        columns = [rule for rule in order if total.num_rejected.get(rule)]
        table = Table("source", box=None, pad_edge=False)
        for heading in ("read", "kept", *columns):
            table.add_column(heading, justify="right")
        rows = list(self.of_source.items())
        for name, counts in rows if len(rows) == 1 else [*rows, ("all", total)]:
            numbers = [
                counts.num_read,
                counts.num_kept,
                *(counts.num_rejected.get(rule, 0) for rule in columns),
            ]
            table.add_row(name, *(f"{number:,}" for number in numbers))
        return table

    def to_json(self) -> dict[str, object]:
        """As a JSON object."""
        return {
            name: {"read": counts.num_read, "kept": counts.num_kept, "rejected": dict(counts.num_rejected)}
            for name, counts in self.of_source.items()
        }

    @classmethod
    def from_json(cls, fields: object) -> FilterCounts:
        """From what `to_json` gave.

        Raises:
            InvalidOption: it is something else.
        """
        try:
            return cls(
                {
                    str(name): SourceCounts(
                        int(counts["read"]),
                        {str(rule): int(number) for rule, number in counts["rejected"].items()},
                    )
                    for name, counts in fields.items()  # type: ignore[attr-defined]
                }
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidOption(
                f"these are no counts of filtered pairs ({type(error).__name__}); delete the file, it is "
                "made anew"
            ) from error
