"""Alerts and dashboard, against a real Prometheus where there is one (Debian: apt-get install prometheus)."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_server import PROMETHEUS, PROMTOOL, Prometheus, running_prometheus

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "dragoman.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
METRIC = re.compile(r"\b(?:dragoman|process|python)_[a-z_]+|\bup\b")

needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool (Debian package prometheus) is not installed"
)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), ALERTS) as running:
        yield running


def concrete(expression: str) -> str:
    """A panel's query as the dashboard asks it with everything selected."""
    for variable, value in (("$__rate_interval", "1m"), ("$job", ".*"), ("$instance", ".*")):
        expression = expression.replace(variable, value)
    assert "$" not in expression
    return expression


def queries() -> Iterator[Any]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")


@needs_prometheus
@pytest.mark.parametrize("expression", list(queries()))
def test_a_panels_query_finds_numbers(prometheus: Prometheus, expression: str) -> None:
    values = prometheus.values(concrete(expression))
    assert values
    assert all(math.isfinite(value) for value in values)


@needs_prometheus
@pytest.mark.parametrize("rule", [pytest.param(rule, id=rule["alert"]) for rule in RULES])
def test_an_alert_asks_for_series_that_the_service_has(prometheus: Prometheus, rule: dict[str, Any]) -> None:
    prometheus.get("/api/v1/query", query=rule["expr"])
    known = set(prometheus.get("/api/v1/label/__name__/values"))
    assert set(METRIC.findall(rule["expr"])) <= known
    # Each selector by itself, labels included; a service without trouble has no series of some.
    selectors = re.findall(r"[a-z_]+\{[^}]*\}", rule["expr"])
    assert selectors
    assert all(prometheus.values(selector) for selector in selectors)


@needs_prometheus
def test_prometheus_has_loaded_every_alert(prometheus: Prometheus) -> None:
    groups = prometheus.get("/api/v1/rules")["groups"]
    loaded = [rule["name"] for group in groups for rule in group["rules"]]
    assert loaded == [rule["alert"] for rule in RULES]
    assert all(rule["health"] != "err" for group in groups for rule in group["rules"])


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "alerts.yml"),
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "alerts.test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=ALERTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_shown_to_fire_and_says_what_to_do() -> None:
    tests = yaml.safe_load((ALERTS.parent / "alerts.test.yml").read_text())["tests"]
    fired = {
        re.search(r'alertname="(\w+)"', sample["labels"])
        for check in tests[1]["promql_expr_test"]
        for sample in check["exp_samples"]
    }
    assert {match.group(1) for match in fired if match} == {rule["alert"] for rule in RULES}
    runbook = (ROOT / "docs" / "operations.md").read_text()
    for rule in RULES:
        assert rule["alert"] in runbook
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_page_of_metrics_knows_every_metric_that_is_used() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^### (\S+)", page, re.M))
    expressions = [rule["expr"] for rule in RULES]
    expressions += [target["expr"] for panel in PANELS for target in panel["targets"]]
    used = {
        re.sub(r"_created$", "_total", re.sub(r"_(bucket|sum|count)$", "", name))
        for expression in expressions
        for name in METRIC.findall(expression)
    }
    assert used - {"up"} <= documented
    # The other way round: what nobody can see need not be measured.
    unseen = {"dragoman_http_requests_in_flight", "process_virtual_memory_bytes"}
    assert documented - used <= unseen


def test_the_dashboard_is_whole() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "instance"]
    assert DASHBOARD["schemaVersion"] >= 39
    for panel in PANELS:
        assert panel["description"].endswith(".")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert 'job=~"$job", instance=~"$instance"' in target["expr"]
            assert target["legendFormat"]


def test_no_panel_lies_on_another_or_beyond_the_page() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart


def test_grafana_finds_the_dashboard_and_prometheus_where_compose_mounts_them() -> None:
    docker = ROOT / "docker"
    compose = yaml.safe_load((docker / "compose.yaml").read_text())["services"]
    provisioning = docker / "grafana" / "provisioning"
    [provider] = yaml.safe_load((provisioning / "dashboards" / "dragoman.yaml").read_text())["providers"]
    [source] = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert source["url"] == "http://prometheus:9090"
    assert "127.0.0.1:9090:9090" in compose["prometheus"]["ports"]
    scrape = yaml.safe_load((docker / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert scrape[0]["static_configs"][0]["targets"] == ["dragoman:8000"]
    assert scrape[0]["job_name"] == "dragoman"
