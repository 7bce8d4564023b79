"""The Helm chart: its value sets and custom resources, and what it says of wrong values."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from fissile.client import AsyncClient

from common.limits import HEALTH_TIMEOUT_S
from common.params.options.types import seconds
from facade.app import FacadeApp
from facade.http.runner import AnswerRunner
from router.api.scaling import ScalingTrigger
from router.workers.addresses import DnsTarget, parse_targets
from tests.deploy.custom_resources import CUSTOM, broken_rules, problems
from tests.deploy.definitions import problems as definition_problems
from tests.deploy.definitions import schemas
from tests.deploy.manifests import (
    CHART,
    COMPONENTS_OF,
    VARIANTS,
    Object,
    all_objects,
    container,
    objects,
    pod,
    template,
    workload,
)
from tests.deploy.tools import ROOT, run, tool
from tests.promql import rules

RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def custom(variant: str) -> list[Object]:
    return [found for found in all_objects(variant) if found["kind"] in CUSTOM]


def test_lint_finds_nothing() -> None:
    for variant in VARIANTS:
        result = run([tool("helm"), "lint", "--strict", CHART, "-f", CHART / "ci" / f"{variant}.yaml"])
        assert result.returncode == 0, result.stdout


def test_at_least_ten_value_sets_render() -> None:
    rendered = [variant for variant in VARIANTS if all_objects(variant)]
    assert len(rendered) >= 10
    made = {found["kind"] for variant in rendered for found in custom(variant)}
    assert made == CUSTOM


def test_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert f'version = "{chart["version"]}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert chart["version"] == chart["appVersion"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_custom_resources_have_known_fields_alone(variant: str) -> None:
    assert [problem for found in custom(variant) for problem in problems(found)] == []


def test_custom_resources_keep_their_rules() -> None:
    assert broken_rules(found for variant in VARIANTS for found in custom(variant)) == []


def of_kind(variant: str, kind: str) -> Object:
    return copy.deepcopy(objects(variant, kind)[0])


MISTAKES: dict[str, tuple[str, str, Callable[[Object], object]]] = {
    "unknown field": ("keda", "ScaledObject", lambda spec: spec.update(minReplicas=1)),
    "missing field": ("mtls", "Certificate", lambda spec: spec.pop("issuerRef")),
    "wrong type": ("groups", "LeaderWorkerSet", lambda spec: spec.update(replicas="two")),
    "wrong word": ("gateway", "InferencePool", lambda spec: spec.update(appProtocol="grpc")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_custom_resource_is_found(mistake: str) -> None:
    variant, kind, spoil = MISTAKES[mistake]
    found = of_kind(variant, kind)
    spoil(found["spec"])
    assert len(problems(found)) == 1


def test_broken_rule_is_found() -> None:
    pool, scaled = of_kind("gateway", "InferencePool"), of_kind("keda", "ScaledObject")
    del pool["spec"]["endpointPickerRef"]["port"]
    scaled["spec"]["maxReplicaCount"] = -1
    assert len(broken_rules([pool, scaled])) == 2


# Wrong values, and what the message has.
WRONG = {
    "router.replicas=two": "'/router/replicas': got string, want integer",
    "router.image.repository=": "'/router/image/repository': minLength: got 0, want 1",
    "router.replica=2": "additional properties 'replica' not allowed",
    "worker.kind=deployment": "'statefulSet', 'leaderWorkerSet'",
    "worker.gpu.vendor=intel": "'none', 'amd', 'nvidia'",
    "router.drainTimeoutSeconds=-1": "minimum: got -1, want 0",
    "worker.options.modle=x": 'worker.options: "modle" is no option of `fissile worker`',
    "facade.enabled=true,facade.options.queue-size=1": 'facade.options: "queue-size" is no option of `fissile http`',
    "router.options.port=1": 'router.options: the chart sets "port" itself',
    "worker.gpu.vendor=amd,worker.image.repository=fissile-worker-cpu": "use fissile-worker-rocm",
    "worker.gpu.vendor=nvidia,worker.image.repository=fissile-worker-rocm": "use fissile-worker-cuda",
    "worker.cache.kind=hostPath": "worker.cache.name: the folder on the node",
    "worker.kind=leaderWorkerSet,worker.group.secret=s,worker.cache.kind=volumeClaim": "worker.cache.kind: volumeClaim",
    "worker.kind=leaderWorkerSet": "worker.group.secret: the Secret whose key `secret`",
    "worker.options.dp-size=2": "worker.options: the chart has no workers in lockstep (dp-size, dp-rank)",
    "worker.options.dp-rank=1": "worker.options: the chart has no workers in lockstep (dp-size, dp-rank)",
    "router.options.dp-size=2": 'router.options: "dp-size" is no option of `fissile router`',
    "worker.enabled=false": "router.extraWorkers: name the workers",
    "facade.enabled=true,router.enabled=false": "facade needs router.enabled",
    "networkPolicy.workerCallers[0].pods=a": "additional properties 'pods' not allowed",
    "autoscaling.kind=hpa,autoscaling.minReplicas=0": "autoscaling.minReplicas is 0: that needs kind keda",
    "autoscaling.kind=hpa,autoscaling.minReplicas=9": "autoscaling.maxReplicas is 8: at least minReplicas, 9",
    "autoscaling.kind=keda,router.enabled=false": "autoscaling needs worker.enabled, and for keda router.enabled",
    "autoscaling.kind=keda,worker.options.model-name=null": "autoscaling needs the name of the model",
    "tls.enabled=true,tls.certManager.enabled=true": "tls.certManager.issuer.name",
    "tls.certManager.enabled=true": "tls.certManager.enabled needs tls.enabled",
    "gateway.enabled=true": "gateway.parentRefs: name the Gateway",
    "inferencePool.enabled=true": "inferencePool needs facade.enabled",
    "autoscaling.keda.slack=half": "does not match pattern",
}


@pytest.mark.parametrize("values", WRONG)
def test_wrong_value_is_refused_by_name(values: str) -> None:
    result = template("--set", values)
    assert result.returncode != 0
    assert WRONG[values] in result.stderr


@pytest.mark.parametrize("values", ["router.options=null", "worker.options=null", "worker.options.dp-size=1"])
def test_options_that_change_nothing_are_accepted(values: str) -> None:
    result = template("--set", values)
    assert result.returncode == 0, result.stderr


def test_probe_of_facade_waits_longer_than_facade_for_routers() -> None:
    """Former fault: /health waited for two seconds twice, and a probe for two."""
    probes = [container(each, "facade")["readinessProbe"] for each in VARIANTS if "facade" in COMPONENTS_OF[each]]
    assert probes
    assert all(probe["timeoutSeconds"] > HEALTH_TIMEOUT_S for probe in probes)


def test_values_in_the_how_to_are_accepted(tmp_path: Path) -> None:
    """Former fault: the values for a model over several machines were refused."""
    assert len(snippets("kubernetes.md")) == 3
    for snippet in snippets("kubernetes.md"):
        (tmp_path / "values.yaml").write_text(snippet)
        result = template("-f", tmp_path / "values.yaml")
        assert result.returncode == 0, result.stderr


def test_names_of_another_release_do_not_collide() -> None:
    result = template(release="blue")
    assert result.returncode == 0, result.stderr
    names = {found["metadata"]["name"] for found in yaml.safe_load_all(result.stdout)}
    assert names - {"fissile"} == {"blue-fissile-router", "blue-fissile-routers", "blue-fissile-worker"}


DEFINITION = """
apiVersion: v1
kind: List
items:
  - kind: CustomResourceDefinition
    spec:
      group: keda.sh
      names: {kind: ScaledObject}
      versions:
        - name: v1alpha1
          schema:
            openAPIV3Schema:
              type: object
              properties:
                apiVersion: {type: string}
                kind: {type: string}
                metadata: {type: object}
                spec:
                  type: object
                  required: [scaleTargetRef]
                  properties:
                    scaleTargetRef: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {}}
                    minReplicaCount: {type: integer}
                    maxReplicaCount: {type: integer}
                    pollingInterval: {x-kubernetes-int-or-string: true}
                    cooldownPeriod: {type: integer, maximum: 1000}
                    initial: {type: integer, default: 1}
                    advanced: {type: object, additionalProperties: {type: object, additionalProperties: true}}
                    triggers: {type: array, items: {type: object, x-kubernetes-preserve-unknown-fields: true}}
                  x-kubernetes-validations:
                    - {rule: self.minReplicaCount <= self.maxReplicaCount}
                    - {rule: self.initial == 1}
                    - {rule: self.initial == oldSelf.initial}
"""


def test_definitions_of_a_project_find_wrong_fields_and_broken_rules() -> None:
    known = schemas(yaml.safe_load_all(DEFINITION))
    right = of_kind("keda", "ScaledObject")
    assert definition_problems([right], known) == ([], 2)
    wrong = of_kind("keda", "ScaledObject")
    wrong["spec"] |= {"minReplicas": 1, "cooldownPeriod": 2000, "minReplicaCount": 9}
    del wrong["spec"]["scaleTargetRef"]
    found, _ = definition_problems([wrong], known)
    assert sorted(found) == [
        "ScaledObject $.spec.cooldownPeriod: 2000 is greater than the maximum of 1000",
        "ScaledObject $.spec: 'scaleTargetRef' is a required property",
        "ScaledObject $.spec: Additional properties are not allowed ('minReplicas' was unexpected)",
        "ScaledObject: the rule 'self.minReplicaCount <= self.maxReplicaCount' is broken",
    ]


def test_pod_monitor_selects_all_components() -> None:
    for variant in ("mtls", "facade", "hpa"):
        (monitor,) = objects(variant, "PodMonitor")
        for component in COMPONENTS_OF[variant]:
            labels = pod(variant, component)["metadata"]["labels"]
            assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
        ports = {port["name"] for port in container(variant, "worker")["ports"]}
        assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_autoscalers_scale_the_workers() -> None:
    for variant, kind in (("keda", "ScaledObject"), ("hpa", "HorizontalPodAutoscaler")):
        (found,) = objects(variant, kind)
        worker, target = workload(variant, "worker"), found["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) == (worker["apiVersion"], worker["kind"])
        assert target["name"] == worker["metadata"]["name"]
        # Else each upgrade of the release would set the number of workers back.
        assert "replicas" not in worker["spec"]
    (metric,) = objects("hpa", "HorizontalPodAutoscaler")[0]["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in {name.replace(":", "_") for name in RECORDED}


def snippets(page: str) -> list[str]:
    """The examples in YAML of a how-to."""
    return re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "how-to" / page).read_text("utf-8"), re.DOTALL)


def test_autoscalers_in_the_how_tos_are_those_of_the_chart() -> None:
    (hpa,) = [yaml.safe_load(text) for text in snippets("monitor.md") if "HorizontalPodAutoscaler" in text]
    assert hpa["spec"] == objects("hpa", "HorizontalPodAutoscaler")[0]["spec"]
    (scaled,) = [yaml.safe_load(text) for text in snippets("autoscale-with-keda.md")]
    (ours,) = objects("keda", "ScaledObject")
    assert problems(scaled) == broken_rules([scaled]) == []
    assert scaled["spec"].keys() == ours["spec"].keys()
    for trigger, own in zip(scaled["spec"]["triggers"], ours["spec"]["triggers"], strict=True):
        assert (trigger["type"], trigger["metricType"]) == (own["type"], own["metricType"])
        assert ScalingTrigger.from_metadata(trigger["metadata"]).metrics.keys() <= {"requests", "ttft-use"}


def test_scaled_object_is_what_the_routers_serve() -> None:
    (scaled,) = objects("keda", "ScaledObject")
    (options,) = (yaml.safe_load(o["data"]["router.yaml"])["router"] for o in objects("keda", "ConfigMap"))
    services = {o["metadata"]["name"]: o["spec"] for o in objects("keda", "Service")}
    metrics = []
    for trigger in scaled["spec"]["triggers"]:
        made = ScalingTrigger.from_metadata(trigger["metadata"])
        assert options["expect-model"] == [made.model]
        (target,) = parse_targets([trigger["metadata"]["scalerAddress"]])
        assert isinstance(target, DnsTarget)
        service = services[target.name.removesuffix(".llm.svc")]
        # KEDA itself balances over all routers.
        assert service["clusterIP"] == "None"
        ports = {port["name"]: port["port"] for port in service["ports"]}
        assert ports["scaler"] == target.port == options["scaler-port"]
        metrics += [(name, trigger["type"], trigger["metricType"], m.target) for name, m in made.metrics.items()]
    assert metrics == [("requests", "external-push", "AverageValue", 48.0), ("ttft-use", "external", "Value", 0.6)]
    assert seconds(options["worker-wait"]) == 600


def test_pool_selects_facades_by_the_port_that_serves_metrics() -> None:
    (pool,) = objects("gateway", "InferencePool")
    labels = pod("gateway", "facade")["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == "vllm"
    ports = {port["containerPort"] for port in container("gateway", "facade")["ports"]}
    assert {port["number"] for port in pool["spec"]["targetPorts"]} == ports
    (route,) = objects("gateway", "HTTPRoute")
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    (grpc,) = objects("gateway", "GRPCRoute")
    served = {each["method"]["service"] for each in grpc["spec"]["rules"][0]["matches"]}
    assert served == {"fissile.v1.InferenceService", "inference.GRPCInferenceService"}


def test_gateway_routes_all_paths_of_the_facade() -> None:
    """`/health`, `/metrics` and `/version` are for operators."""
    (route,) = objects("gateway", "HTTPRoute")
    prefixes = [match["path"]["value"] for match in route["spec"]["rules"][0]["matches"]]
    app = FacadeApp(AsyncClient("127.0.0.1:1"), AnswerRunner(AsyncClient("127.0.0.1:1")), 1.0)
    paths = {each.path for each in app.routes()} - {"/health", "/version"}
    assert [path for path in paths if not any(path == each or path.startswith(f"{each}/") for each in prefixes)] == []
    assert [each for each in prefixes if not any(path.startswith(each) for path in paths)] == []


def test_values_file_documents_every_value_of_the_schema() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))

    def named(node: Any, value: Any, path: str) -> list[str]:
        if "properties" not in node or not isinstance(value, dict):
            return []
        missing = [
            f"{path}{name}" for name in node["properties"] if name not in value and name not in ("global", "enabled")
        ]
        return missing + [m for n, v in value.items() for m in named(node["properties"].get(n, {}), v, f"{path}{n}.")]

    assert named(schema, values, "") == []
