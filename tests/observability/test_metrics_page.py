"""docs/metrics.md against what the service registers."""

from __future__ import annotations

import re
from pathlib import Path

from fed_metrics import fed_metrics
from prometheus_client.parser import text_string_to_metric_families

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
SECTION = re.compile(
    r"^### (\S+)\nType: (\S+) · Labels: ([^·]+) · Unit: (\S.*)\n((?:.+\n)+?)When bad: \S", re.M
)


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    return {
        name: (kind, frozenset() if labels.strip() == "none" else frozenset(labels.strip().split(", ")))
        for name, kind, labels, _unit, _meaning in SECTION.findall(PAGE)
    }


def registered() -> dict[str, tuple[str, frozenset[str]]]:
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for family in text_string_to_metric_families(fed_metrics().exposition().decode()):
        if family.name.endswith("_created"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert family.samples, f"{name}: the tests feed it nothing, so its labels are not known"
        found[name] = (family.type, frozenset(labels))
    return found


def test_every_metric_is_on_the_page_with_its_type_and_labels_and_no_other_is() -> None:
    assert documented() == registered()


def test_every_heading_of_the_page_was_read() -> None:
    """A section whose lines are not in order would be skipped, and guard nothing."""
    assert re.findall(r"^### (\S+)", PAGE, re.M) == list(documented())


def test_the_settings_that_the_page_names_exist() -> None:
    from app.settings import Settings

    known = {f"DRAGOMAN_{field.upper()}" for field in Settings.model_fields}
    assert set(re.findall(r"DRAGOMAN_[A-Z_]+", PAGE)) <= known
