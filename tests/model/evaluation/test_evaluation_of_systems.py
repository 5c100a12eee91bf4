import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from app.errors import InvalidOption
from model.evaluation.evaluation import evaluate
from model.evaluation.measures import Speed
from model.evaluation.ready_system import ReadySystem
from model.evaluation.report import as_json, print_tables
from model.evaluation.system import Languages, Translations
from model.evaluation.testset import TestSet

REFERENCES = tuple(f"this is the {word} line of all" for word in ("first", "second", "third", "fourth"))
TESTSET = TestSet("t", tuple(f"one two three four {word}" for word in "abcd"), REFERENCES)
OTHER = TestSet("u", TESTSET.sources[:2], REFERENCES[:2])
QUIET = Console(file=io.StringIO())


@dataclass(frozen=True)
class FakeSystem:
    name: str
    lines: Mapping[str, Sequence[str]]
    speed: Speed | None = None
    refuses: bool = False
    asked: list[str] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, object]:
        return {"kind": "fake"}

    def check(self, testset: TestSet) -> None:
        assert not self.asked
        if self.refuses:
            raise InvalidOption("not this one")

    def translate(self, testset: TestSet) -> Translations:
        self.asked.append(testset.name)
        return Translations(tuple(self.lines[testset.name]), self.speed)


def perfect(name: str = "perfect") -> FakeSystem:
    lines = {"t": REFERENCES, "u": REFERENCES[:2]}
    return FakeSystem(name, lines, Speed(0.5, 4, 20, "all of it"))


def poor() -> FakeSystem:
    lines = {"t": ["", "ab " * 9, TESTSET.sources[2], "this line"], "u": ["x", "y"]}
    return FakeSystem("poor", lines)


def cells_of(text: str, system: str) -> list[list[str]]:
    """The rows that begin with a system's name."""
    return [line.split() for line in text.splitlines() if line.split()[:1] == [system]]


def test_systems_stand_side_by_side_in_one_table_for_each_test_set() -> None:
    found = evaluate([perfect(), poor()], [TESTSET, OTHER], num_samples=100, console=QUIET)
    file = io.StringIO()
    print_tables(found, Console(file=file, width=40))
    text = file.getvalue()
    first, second = text.split("u, 2 lines")
    assert "t, 4 lines" in first
    assert cells_of(first, "perfect") == [
        ["perfect", "100.00", "±", "0.00", "-", "100.00", "±", "0.00", "-", "1.000", *"000", "40", "8.0"]
    ]
    ((*_, empty, repeated, copied, tokens_per_s, lines_per_s),) = cells_of(first, "poor")
    assert (empty, repeated, copied, tokens_per_s, lines_per_s) == ("1", "1", "1", "-", "-")
    assert len(cells_of(second, "perfect")) == len(cells_of(second, "poor")) == 1
    assert "paired bootstrap against perfect" in text
    assert "all of it" in text


def test_a_narrow_terminal_gets_two_tables_with_nothing_cut() -> None:
    found = evaluate([perfect(), poor()], [TESTSET], num_samples=100, console=QUIET)
    texts = []
    for width in (200, 70, 30):
        file = io.StringIO()
        print_tables(found, Console(file=file, width=width, force_terminal=True, color_system=None))
        texts.append(file.getvalue())
    wide, narrow, tiny = texts
    assert len(cells_of(wide, "perfect")) == 1
    scores, rest = cells_of(narrow, "perfect")
    assert [*scores, *rest[1:]] == cells_of(wide, "perfect")[0]
    assert "…" not in narrow + tiny
    assert cells_of(tiny, "perfect") == cells_of(narrow, "perfect")


def test_a_single_system_is_compared_with_nothing() -> None:
    (found,) = evaluate([poor()], [TESTSET], num_samples=100, console=QUIET)
    assert found.comparison is None
    file = io.StringIO()
    print_tables([found], Console(file=file))
    assert "±" not in file.getvalue()
    assert "bootstrap" not in file.getvalue()


def test_the_json_has_everything() -> None:
    found = evaluate([perfect(), poor()], [TESTSET], num_samples=100, console=QUIET)
    facts = json.loads(json.dumps(as_json(found, languages=Languages("en", "pt"), num_samples=100)))
    assert (facts["source"], facts["target"], facts["num_samples"]) == ("en", "pt", 100)
    (testset,) = facts["test_sets"]
    assert (testset["name"], testset["num_lines"]) == ("t", 4)
    assert "bs:100|seed:12345" in testset["bootstrap_signatures"]["bleu"]
    first, second = testset["systems"]
    assert first["kind"] == "fake"
    assert first["bleu"] == pytest.approx(100)
    assert first["speed"] == {
        "covers": "all of it",
        "elapsed_s": 0.5,
        "num_target_tokens": 20,
        "target_tokens_per_s": 40,
        "lines_per_s": 8,
    }
    assert first["bootstrap"]["bleu"]["p_value"] is None
    assert 0 < second["bootstrap"]["chrf"]["p_value"] <= 1
    assert (second["empty_lines"], second["repeated_lines"], second["copied_lines"]) == ([1], [2], [3])
    assert second["speed"] is None


def test_kept_translations_can_be_evaluated_again(tmp_path: Path) -> None:
    before = evaluate([poor()], [TESTSET, OTHER], num_samples=100, outputs=tmp_path / "out", console=QUIET)
    assert sorted(path.name for path in (tmp_path / "out" / "poor").iterdir()) == ["t.txt", "u.txt"]
    again = ReadySystem("poor", tmp_path / "out" / "poor")
    after = evaluate([again], [TESTSET, OTHER], num_samples=100, console=QUIET)
    assert [part.outcomes[0].measures for part in after] == [part.outcomes[0].measures for part in before]


def test_mistakes_show_before_anything_is_translated(tmp_path: Path) -> None:
    good = perfect()
    short = tmp_path / "short.txt"
    short.write_text("one\n")
    for systems, testsets, words in (
        ([good, FakeSystem("other", {}, refuses=True)], [TESTSET], "not this one"),
        ([good, perfect()], [TESTSET], "two systems perfect"),
        ([good], [TESTSET, TESTSET], "two test sets t"),
        ([good, ReadySystem("short", short)], [TESTSET], "has 1 lines, test set t has 4"),
        ([good, ReadySystem("none", tmp_path)], [TESTSET], "t.txt cannot be read"),
    ):
        with pytest.raises(InvalidOption, match=words):
            evaluate(systems, testsets, num_samples=100, outputs=tmp_path / "out", console=QUIET)
    assert good.asked == []
    assert not (tmp_path / "out").exists()
