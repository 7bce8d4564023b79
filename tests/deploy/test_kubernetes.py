"""The Kubernetes manifests: valid for three versions, and in agreement with the programs that they start."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from grpc_health.v1 import health_pb2

from common.cli.client.health import serving_status
from common.limits import (
    DRAIN_PROPAGATION_S,
    ENGINE_JOIN_S,
    SESSION_FLUSH_S,
    TELEMETRY_SHUTDOWN_S,
)
from common.rpc.server import LIVENESS, READINESS, GrpcServer
from router.workers.addresses import DnsTarget, parse_targets
from tests.certificates import Authority
from tests.deploy.container_file import ContainerFile
from tests.deploy.manifests import (
    KUBERNETES,
    VARIANTS,
    Object,
    command_of,
    container,
    environment,
    objects,
    pod,
    probes,
    rendered,
    workload,
)
from tests.deploy.tools import DEPLOY, ROOT, TOOLS, run, tool
from tests.e2e.service import Process, free_port
from tests.e2e.simulated import OPTIONS, simulated_model

VERSIONS = ("1.30.0", "1.34.0", "1.37.0")
COMPONENTS = ("router", "worker")
GIB = 1 << 30
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

each = pytest.mark.parametrize(("variant", "component"), [(v, c) for v in VARIANTS for c in COMPONENTS])


def file_of(variant: str, component: str) -> ContainerFile:
    """The container file that the image of a container comes from."""
    name, _, version = container(variant, component)["image"].partition(":")
    assert version == re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    return ContainerFile.read(DEPLOY / "docker" / f"{name.removeprefix('fissile-')}.Dockerfile")


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Reads a container's options as its program would: arguments, the file, the manifest's variables, the image's."""

    def read(variant: str, component: str) -> dict[str, Any]:
        (tmp_path / "router.yaml").write_text(router_configuration(variant))
        name, *arguments = container(variant, component)["args"]
        assert name == component
        here = [argument.replace("/etc/fissile", str(tmp_path)) for argument in arguments]
        variables = file_of(variant, component).environment | environment(variant, component)
        with monkeypatch.context() as patched:
            for variable, value in variables.items():
                if variable.startswith("FISSILE_"):
                    patched.setenv(variable, value)
            return command_of(component).make_context(component, here).params

    return read


def router_configuration(variant: str) -> str:
    (found,) = [o for o in objects(variant, "ConfigMap") if o["metadata"]["name"] == "fissile-router"]
    text = found["data"]["router.yaml"]
    assert isinstance(text, str)
    return text


def matches(selector: dict[str, str], variant: str, component: str) -> bool:
    labels: dict[str, str] = pod(variant, component)["metadata"]["labels"]
    return selector.items() <= labels.items()


def selected(selector: dict[str, str], variant: str) -> list[str]:
    return [component for component in COMPONENTS if matches(selector, variant, component)]


def test_yamllint_finds_nothing() -> None:
    result = run([tool("yamllint"), "--strict", "deploy", ".yamllint.yaml"])
    assert (result.returncode, result.stdout) == (0, "")


# What is wrong on purpose, so that a validator which finds nothing is noticed: in place of the first, the second.
MISTAKES = {"replicas: 2": "replicas: two", "livenessProbe:": "aliveProbe:", "grpc: {port": "rpc: {port"}
VALIDATE = """
import json, sys, yaml, kubernetes_validate
def errors(manifests):
    for found in yaml.safe_load_all(manifests):
        for version in sys.argv[1:]:
            try:
                kubernetes_validate.validate(found, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield version, error.message
print(json.dumps({name: list(errors(manifests)) for name, manifests in json.load(sys.stdin).items()}))
"""


def workers_with(right: str, wrong: str) -> str:
    """The StatefulSet of the workers with a mistake in it."""
    (manifest,) = [text for text in rendered("base").split("\n---\n") if "kind: StatefulSet" in text]
    assert right in manifest
    return manifest.replace(right, wrong)


@pytest.fixture(scope="module")
def validated() -> dict[str, list[tuple[str, str]]]:
    """What the schemas of the three versions say against each variant, the autoscaler, and each mistake."""
    tool("kubernetes-validate")
    variants = {variant: rendered(variant) for variant in VARIANTS if variant == "base" or shutil.which("kubectl")}
    variants["autoscaler"] = (DEPLOY / "observability" / "kubernetes" / "autoscaler.yaml").read_text()
    mistakes = {right: workers_with(right, wrong) for right, wrong in MISTAKES.items()}
    result = run([TOOLS / "python", "-c", VALIDATE, *VERSIONS], stdin=json.dumps(variants | mistakes))
    assert result.returncode == 0, result.stderr
    found: dict[str, list[tuple[str, str]]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_valid_for_three_versions(variant: str, validated: dict[str, list[tuple[str, str]]]) -> None:
    rendered(variant)
    assert validated[variant] == []


def test_autoscaler_is_valid(validated: dict[str, list[tuple[str, str]]]) -> None:
    assert validated["autoscaler"] == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_manifest_is_found(mistake: str, validated: dict[str, list[tuple[str, str]]]) -> None:
    assert {version for version, _ in validated[mistake]} == set(VERSIONS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_match_pods(variant: str) -> None:
    for service in objects(variant, "Service"):
        assert selected(service["spec"]["selector"], variant) == [component_of(service)]
    for budget in objects(variant, "PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"]["matchLabels"], variant) == [component_of(budget)]
    for component in COMPONENTS:
        spec = workload(variant, component)["spec"]
        assert selected(spec["selector"]["matchLabels"], variant) == [component]
        (spread,) = spec["template"]["spec"]["topologySpreadConstraints"]
        assert selected(spread["labelSelector"]["matchLabels"], variant) == [component]
    assert workload(variant, "worker")["spec"]["serviceName"] == "fissile-worker"


def component_of(found: Object) -> str:
    component = found["metadata"]["labels"]["app.kubernetes.io/component"]
    assert isinstance(component, str)
    return component


@pytest.mark.parametrize("variant", VARIANTS)
def test_ports_are_named_and_say_grpc(variant: str) -> None:
    for service in objects(variant, "Service"):
        ports = {port["name"]: port["containerPort"] for port in container(variant, component_of(service))["ports"]}
        for port in service["spec"]["ports"]:
            assert port["appProtocol"] == "grpc"
            assert ports[port["targetPort"]] == port["port"]


@each
def test_container_options_are_accepted_by_program(variant: str, component: str, in_force: Any) -> None:
    options = in_force(variant, component)
    assert options["host"] == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in container(variant, component)["ports"]}
    assert ports == {"grpc": options["port"], "metrics": options["metrics_port"]}
    annotations = pod(variant, component)["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(options["metrics_port"])}


@each
def test_manifest_variables_exist_in_program(variant: str, component: str) -> None:
    known = {option.envvar for option in command_of(component).params if isinstance(option, click.Option)}
    ours = {entry["name"] for entry in container(variant, component)["env"] if entry["name"].startswith("FISSILE_")}
    assert ours <= known


def test_config_show_accepts_config_map(tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(router_configuration("base"))
    show = ["-m", "common.cli.main", "config", "show", "--json", "router", "--config"]
    result = run([sys.executable, *show, str(tmp_path / "router.yaml")])
    assert result.returncode == 0, result.stderr
    from_file = {n for n, option in json.loads(result.stdout).items() if option["source"] == "--config file"}
    assert from_file == yaml.safe_load(router_configuration("base"))["router"].keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_routers_resolve_workers_by_headless_service(variant: str, in_force: Any) -> None:
    (target,) = parse_targets(in_force(variant, "router")["workers"])
    assert isinstance(target, DnsTarget)
    (service,) = [s for s in objects(variant, "Service") if s["metadata"]["name"] == target.name]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert component_of(service) == "worker"
    assert [port["port"] for port in service["spec"]["ports"]] == [target.port]


def test_envoy_resolves_routers_by_headless_service() -> None:
    mesh = yaml.safe_load((DEPLOY / "mesh" / "envoy.yaml").read_text())
    (cluster,) = mesh["static_resources"]["clusters"]
    (endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    address = endpoint["endpoint"]["address"]["socket_address"]
    (service,) = [s for s in objects("base", "Service") if s["metadata"]["name"] == address["address"]]
    assert service["spec"]["clusterIP"] == "None"
    # What is not ready gets no calls; a health check of Envoy's own decides among the rest.
    assert "publishNotReadyAddresses" not in service["spec"]
    assert service["spec"]["ports"][0]["port"] == address["port_value"]
    assert cluster["health_checks"][0]["grpc_health_check"]["service_name"] == READINESS


async def test_probes_name_existing_health_services() -> None:
    asked = {probe["grpc"]["service"] for v in VARIANTS for c in COMPONENTS for probe in probes(v, c)}
    assert asked == {LIVENESS, READINESS}
    server = GrpcServer("127.0.0.1", 0, [])
    await server.start()
    try:
        states = {name: await serving_status(server.address, name, 60.0) for name in asked}
    finally:
        await server.stop(0)
    # A Pod that has only started is alive and not ready.
    value = health_pb2.HealthCheckResponse.ServingStatus.Name
    assert states == {LIVENESS: value(1), READINESS: value(2)}


@each
def test_probes_use_health_port(variant: str, component: str, in_force: Any) -> None:
    options = in_force(variant, component)
    startup, readiness, liveness = probes(variant, component)
    # Those of Kubernetes speak no TLS.
    port = options["health_port"] if variant == "mtls" else options["port"]
    assert port
    assert {probe["grpc"]["port"] for probe in (startup, readiness, liveness)} == {port}
    assert readiness["grpc"]["service"] == READINESS
    assert liveness["grpc"]["service"] == LIVENESS
    # A router without workers is to wait for them; a worker is given the time to load.
    assert startup["grpc"]["service"] == {"router": LIVENESS, "worker": READINESS}[component]
    if component == "worker":
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@each
def test_grace_period_is_longer_than_drain(variant: str, component: str, in_force: Any) -> None:
    sleep = container(variant, component).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    options = in_force(variant, component)
    drain = DRAIN_PROPAGATION_S + options["drain_timeout_s" if component == "router" else "drain_timeout"]
    ending = 2 * SESSION_FLUSH_S + TELEMETRY_SHUTDOWN_S + ENGINE_JOIN_S
    assert pod(variant, component)["spec"]["terminationGracePeriodSeconds"] >= sleep + drain + ending + 2
    # Endpoints forget a router before it refuses calls; workers tell their routers themselves.
    assert (sleep > 0) == (component == "router")


@each
def test_containers_drop_unneeded_privileges(variant: str, component: str) -> None:
    spec, its = pod(variant, component)["spec"], container(variant, component)["securityContext"]
    assert its["readOnlyRootFilesystem"]
    assert not its["allowPrivilegeEscalation"]
    assert its["capabilities"] == {"drop": ["ALL"]}
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    user, _, group = file_of(variant, component).all("USER")[-1].partition(":")
    assert spec["securityContext"]["runAsUser"] == int(user)
    assert spec["securityContext"]["runAsGroup"] == int(group)


@each
def test_image_writes_only_to_volumes(variant: str, component: str) -> None:
    file = file_of(variant, component)
    mounted = {mount["mountPath"] for mount in container(variant, component)["volumeMounts"]}
    written = {file.environment[name] for name in ("HF_HOME",) if name in file.environment}
    assert written <= mounted
    volumes = {volume["name"] for volume in pod(variant, component)["spec"]["volumes"]}
    assert {mount["name"] for mount in container(variant, component)["volumeMounts"]} == volumes


@each
def test_pod_has_own_service_account_and_priority_class(variant: str, component: str) -> None:
    spec = pod(variant, component)["spec"]
    accounts = {o["metadata"]["name"]: o for o in objects(variant, "ServiceAccount")}
    assert accounts[spec["serviceAccountName"]]["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == f"fissile-{component}"
    assert spec["priorityClassName"] in {o["metadata"]["name"] for o in objects(variant, "PriorityClass")}


@each
def test_pod_empty_dirs_have_size_limit(variant: str, component: str) -> None:
    """Without a limit a Pod could fill its node's disk."""
    volumes = pod(variant, component)["spec"]["volumes"]
    assert [v["name"] for v in volumes if "emptyDir" in v and "sizeLimit" not in v["emptyDir"]] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_unready_pod_does_not_block_node_drain(variant: str) -> None:
    budgets = objects(variant, "PodDisruptionBudget")
    assert len(budgets) == len(COMPONENTS)
    assert {o["spec"]["unhealthyPodEvictionPolicy"] for o in budgets} == {"AlwaysAllow"}


@each
def test_services_set_no_options(variant: str, component: str) -> None:
    """Kubernetes sets NAME_PORT=tcp://... for Services; FISSILE_PORT and FISSILE_WORKER_PORT are options."""
    assert pod(variant, component)["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("variant", VARIANTS)
def test_worker_options_fit_container_limits(variant: str, in_force: Any) -> None:
    """Without options a worker takes a quarter of the machine's free memory and all cores, not the Pod's share."""
    options = in_force(variant, "worker")
    resources = container(variant, "worker")["resources"]
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi)", resources["limits"]["memory"]).groups()  # type: ignore[union-attr]
    assert options["kv_cache_memory"] + GIB <= int(number) * UNITS[unit]
    assert options["threads"] == int(resources["requests"]["cpu"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_permitted_callers_connect(variant: str, in_force: Any) -> None:
    policies = {component_of(policy): policy["spec"] for policy in objects(variant, "NetworkPolicy")}
    assert policies.keys() == set(COMPONENTS)
    for component, policy in policies.items():
        assert selected(policy["podSelector"]["matchLabels"], variant) == [component]
        assert policy["policyTypes"] == ["Ingress"]
        assert [[port["port"] for port in rule["ports"]] for rule in policy["ingress"]] == [["grpc"], ["metrics"]]
        assert policy["ingress"][1]["from"] == [{"namespaceSelector": {}}]
    (source,) = policies["worker"]["ingress"][0]["from"]
    assert source.keys() == {"podSelector"}
    assert selected(source["podSelector"]["matchLabels"], variant) == ["router"]
    options = in_force(variant, "router")
    assert options["admin_host"] == "127.0.0.1"
    assert options["admin_port"] not in {port["containerPort"] for port in container(variant, "router")["ports"]}


def test_rocm_workers_ask_for_a_gpu() -> None:
    resources = container("rocm", "worker")["resources"]
    assert resources["limits"]["amd.com/gpu"] == resources["requests"]["amd.com/gpu"] == "1"
    assert container("rocm", "worker")["image"].startswith("fissile-worker-rocm:")


@pytest.mark.parametrize("component", COMPONENTS)
def test_certificates_are_mounted_from_secret(component: str, in_force: Any) -> None:
    secrets = {v["name"] for v in pod("mtls", component)["spec"]["volumes"] if "secret" in v}
    folders = {m["mountPath"] for m in container("mtls", component)["volumeMounts"] if m["name"] in secrets}
    files = {name: Path(v) for name, v in environment("mtls", component).items() if re.search("_(CERT|KEY|CA)$", name)}
    assert {str(path.parent) for path in files.values()} == folders
    assert {path.name for path in files.values()} == {"tls.crt", "tls.key", "ca.crt"}
    options = in_force("mtls", component)
    assert options["tls_client_ca" if component == "worker" else "worker_ca"].name == "ca.crt"


@contextlib.contextmanager
def started(component: str, folder: Path, environment_: dict[str, str], *arguments: str) -> Iterator[Process]:
    """The program of a component, with health on a port of its own."""
    port, health_port = free_port(), free_port()
    listening = ["--port", str(port), "--health-port", str(health_port)]
    log = folder / f"{component}.log"
    process = Process(component, [component, *arguments, *listening], port, log, environment_, health_port)
    process.start()
    try:
        yield process
    finally:
        process.running.kill()
        process.running.wait()


def test_mtls_variant_connects_routers_and_workers(tmp_path: Path) -> None:
    """The certificates have the names in the kustomization, and the processes have the variables of the manifests."""
    authority = Authority(tmp_path)
    variables = {}
    for component in COMPONENTS:
        folder = tmp_path / component
        folder.mkdir()
        pair = authority.issue(component, f"fissile-{component}")
        for source, name in ((pair.cert, "tls.crt"), (pair.key, "tls.key"), (authority.cert, "ca.crt")):
            shutil.copy(source, folder / name)
        said = environment("mtls", component).items()
        variables[component] = {name: value.replace("/etc/fissile-tls", str(folder)) for name, value in said}
    model = ["--model", str(simulated_model(tmp_path / "model")), *OPTIONS]
    with (
        started("worker", tmp_path, variables["worker"], *model) as worker,
        started("router", tmp_path, variables["router"], "--worker", worker.address) as router,
    ):
        worker.wait_serving(READINESS)
        router.wait_serving(READINESS)


def test_every_file_belongs_to_a_kustomization() -> None:
    for folder in VARIANTS:
        listed = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
        named = {*listed["resources"], *(patch["path"] for patch in listed.get("patches", ()))} - {"../base"}
        found = {path.name for path in (KUBERNETES / folder).glob("*.yaml")} - {"kustomization.yaml"}
        assert named == found
