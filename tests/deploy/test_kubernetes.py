"""The objects of the Helm chart: valid for three versions, and in agreement with the programs that they start."""

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
from tests.deploy.custom_resources import CUSTOM
from tests.deploy.manifests import (
    CHART,
    COMMAND_OF,
    COMPONENTS_OF,
    VARIANTS,
    Object,
    all_objects,
    command_of,
    container,
    environment,
    objects,
    pod,
    probes,
    rendered,
    template,
    workload,
)
from tests.deploy.tools import DEPLOY, ROOT, TOOLS, run, tool
from tests.e2e.service import Process, free_port
from tests.e2e.simulated import OPTIONS, simulated_model

VERSIONS = ("1.30.0", "1.34.0", "1.37.0")
MTLS = ("router", "worker")
GIB = 1 << 30
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}

# Variables of a LeaderWorkerSet's Pods, of its leader.
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "fissile-worker-0.fissile-worker"}

ALL = [(v, c) for v, components in COMPONENTS_OF.items() for c in components]
each = pytest.mark.parametrize(("variant", "component"), ALL)
each_pod = pytest.mark.parametrize(("variant", "component"), [*ALL, ("groups", "rank")])
each_worker = pytest.mark.parametrize(
    "variant", [v for v, components in COMPONENTS_OF.items() if "worker" in components]
)


def file_of(variant: str, component: str) -> ContainerFile:
    """The container file that the image of a container comes from."""
    name, _, version = container(variant, component)["image"].partition(":")
    name = name.removeprefix("registry.example.com/llm/")
    if variant != "nvidia":
        assert version == re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    return ContainerFile.read(DEPLOY / "docker" / f"{name.removeprefix('fissile-')}.Dockerfile")


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Reads a container's options as its program would: arguments, the file, the manifest's variables, the image's."""

    def read(variant: str, component: str, group: dict[str, str] = LWS) -> dict[str, Any]:
        if component == "router":
            (tmp_path / "router.yaml").write_text(router_configuration(variant))
        name, *arguments = container(variant, component)["args"]
        assert name == COMMAND_OF.get(component, "worker")
        here = [argument.replace("/etc/fissile/", f"{tmp_path}/") for argument in arguments]
        variables = file_of(variant, component).environment | environment(variant, component) | group
        with monkeypatch.context() as patched:
            for variable, value in variables.items():
                if variable.startswith(("FISSILE_", "LWS_")):
                    patched.setenv(variable, value)
            return command_of("worker" if component == "rank" else component).make_context(component, here).params

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
    return [component for component in COMPONENTS_OF[variant] if matches(selector, variant, component)]


def test_yamllint_finds_nothing() -> None:
    result = run([tool("yamllint"), "--strict", "deploy", ".yamllint.yaml"])
    assert (result.returncode, result.stdout) == (0, "")


# What is wrong on purpose, so that a validator which finds nothing is noticed: in place of the first, the second.
MISTAKES = {"replicas: 2": "replicas: two", "livenessProbe:": "aliveProbe:", "grpc: {port": "rpc: {port"}
VALIDATE = """
import functools, json, sys, yaml, kubernetes_validate
@functools.cache
def of_object(text):
    errors = []
    for version in sys.argv[1:]:
        try:
            kubernetes_validate.validate(json.loads(text), version, strict=True)
        except kubernetes_validate.ValidationError as error:
            errors.append((version, error.message))
    return errors
def errors(manifests):
    for found in yaml.safe_load_all(manifests):
        yield from of_object(json.dumps(found, sort_keys=True))
print(json.dumps({name: list(errors(manifests)) for name, manifests in json.load(sys.stdin).items()}))
"""


def workers_with(right: str, wrong: str) -> str:
    """The StatefulSet of the workers with a mistake in it."""
    (manifest,) = [text for text in rendered("base").split("\n---\n") if "\nkind: StatefulSet" in text]
    assert right in manifest
    return manifest.replace(right, wrong)


def native(variant: str) -> list[Object]:
    """The objects of a value set whose kinds are Kubernetes' own, and the Pods of LeaderWorkerSets."""
    own = [found for found in all_objects(variant) if found["kind"] not in CUSTOM]
    roles = ("worker", "rank") if objects(variant, "LeaderWorkerSet") else ()
    pods = [{"apiVersion": "v1", "kind": "Pod", **pod(variant, role)} for role in roles]
    for number, each_pod in enumerate(pods):
        each_pod["metadata"] = {"name": f"p{number}", **each_pod["metadata"]}
    return own + pods


@pytest.fixture(scope="module")
def validated() -> dict[str, list[tuple[str, str]]]:
    """What the schemas of the three versions say against each value set, and each mistake.

    Custom resources are left out. Pods of a LeaderWorkerSet are checked as Pods.
    """
    tool("kubernetes-validate")
    helm = (TOOLS / "helm").exists()
    variants = {variant: yaml.safe_dump_all(native(variant)) for variant in VARIANTS if variant == "base" or helm}
    mistakes = {right: workers_with(right, wrong) for right, wrong in MISTAKES.items()}
    result = run([TOOLS / "python", "-c", VALIDATE, *VERSIONS], stdin=json.dumps(variants | mistakes))
    assert result.returncode == 0, result.stderr
    found: dict[str, list[tuple[str, str]]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_valid_for_three_versions(variant: str, validated: dict[str, list[tuple[str, str]]]) -> None:
    rendered(variant)
    assert validated[variant] == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_manifest_is_found(mistake: str, validated: dict[str, list[tuple[str, str]]]) -> None:
    assert {version for version, _ in validated[mistake]} == set(VERSIONS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_selectors_match_pods(variant: str) -> None:
    for service in objects(variant, "Service"):
        assert selected(service["spec"]["selector"], variant) == [component_of(service)]
    for budget in objects(variant, "PodDisruptionBudget"):
        for labels in budgeted(budget):
            assert matches(labels, variant, labels["app.kubernetes.io/component"])
    for component in COMPONENTS_OF[variant]:
        spec = workload(variant, component)["spec"]
        if "selector" in spec:
            assert selected(spec["selector"]["matchLabels"], variant) == [component]
        (spread,) = pod(variant, component)["spec"]["topologySpreadConstraints"]
        assert selected(spread["labelSelector"]["matchLabels"], variant) == [component]
        if workload(variant, component)["kind"] == "StatefulSet":
            assert spec["serviceName"] == "fissile-worker"


def budgeted(budget: Object) -> list[dict[str, str]]:
    """Labels of each kind of Pods that a budget counts."""
    selector = budget["spec"]["selector"]
    parts = selector.get("matchExpressions", [])
    assert all(part["operator"] == "In" for part in parts)
    found = [{**selector["matchLabels"], part["key"]: value} for part in parts for value in part["values"]]
    return found or [selector["matchLabels"]]


def component_of(found: Object) -> str:
    component = found["metadata"]["labels"]["app.kubernetes.io/component"]
    assert isinstance(component, str)
    return component


@pytest.mark.parametrize("variant", VARIANTS)
def test_ports_are_named_and_have_a_protocol(variant: str) -> None:
    for service in objects(variant, "Service"):
        ports = {port["name"]: port["containerPort"] for port in container(variant, component_of(service))["ports"]}
        for port in service["spec"]["ports"]:
            name = service["metadata"]["name"]
            # A Gateway reads the standard's word, Istio reads `grpc`.
            grpc = "kubernetes.io/h2c" if variant == "gateway" and name == "fissile-router" else "grpc"
            assert port["appProtocol"] == ({"facade": "https"}.get(variant, "http") if port["name"] == "http" else grpc)
            assert ports[port["targetPort"]] == port["port"]


@each
def test_container_options_are_accepted_by_program(variant: str, component: str, in_force: Any) -> None:
    options = in_force(variant, component)
    assert options["host"] == "0.0.0.0"
    ports = {port["name"]: port["containerPort"] for port in container(variant, component)["ports"]}
    if component == "facade":
        assert ports == {"http": options["port"]}
        return
    scaler = {} if options.get("scaler_port") is None else {"scaler": options["scaler_port"]}
    assert ports == {"grpc": options["port"], "metrics": options["metrics_port"], **scaler}
    annotations = pod(variant, component)["metadata"]["annotations"]
    assert annotations == {"prometheus.io/scrape": "true", "prometheus.io/port": str(options["metrics_port"])}


def test_pods_of_ranks_run_ranks_of_the_leader(in_force: Any) -> None:
    """The program refuses what a rank does not take, so that the same list of options does not serve for both."""
    leader = in_force("groups", "worker")
    rank = in_force("groups", "rank", {**LWS, "LWS_WORKER_INDEX": "1"})
    assert (leader["node_rank"], rank["node_rank"]) == (0, 1)
    for name in ("model", "tp_size", "nnodes", "dist_init", "dist_secret", "threads"):
        assert leader[name] == rank[name], name
    assert (leader["nnodes"], leader["dist_init"]) == (2, "tcp://fissile-worker-0.fissile-worker:4100")
    assert {probe["grpc"]["port"] for probe in probes("groups", "rank")} == {rank["health_port"]}
    labels = pod("groups", "rank")["metadata"]["labels"]
    # The address of the leader is in the Service of the LeaderWorkerSet's own name. Routers must not find ranks in it.
    (service,) = [o for o in objects("groups", "Service") if o["metadata"]["name"] == "fissile-worker"]
    assert workload("groups", "worker")["metadata"]["name"] == service["metadata"]["name"]
    assert workload("groups", "worker")["spec"]["networkConfig"] == {"subdomainPolicy": "Shared"}
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert selected(service["spec"]["selector"], "groups") == ["worker"]
    assert labels["app.kubernetes.io/component"] == "rank"


@each
def test_manifest_variables_exist_in_program(variant: str, component: str) -> None:
    known = {option.envvar for option in command_of(component).params if isinstance(option, click.Option)}
    ours = {entry["name"] for entry in container(variant, component)["env"] if entry["name"].startswith("FISSILE_")}
    assert ours <= known


@pytest.mark.parametrize("variant", ["base", "keda"])
def test_config_show_accepts_config_map(variant: str, tmp_path: Path) -> None:
    (tmp_path / "router.yaml").write_text(router_configuration(variant))
    show = ["-m", "common.cli.main", "config", "show", "--json", "router", "--config"]
    result = run([sys.executable, *show, str(tmp_path / "router.yaml")])
    assert result.returncode == 0, result.stderr
    from_file = {n for n, option in json.loads(result.stdout).items() if option["source"] == "--config file"}
    assert from_file == yaml.safe_load(router_configuration(variant))["router"].keys()


@pytest.mark.parametrize("variant", [v for v, components in COMPONENTS_OF.items() if {*MTLS} <= {*components}])
def test_routers_resolve_workers_by_headless_service(variant: str, in_force: Any) -> None:
    (target,) = parse_targets(in_force(variant, "router")["workers"])
    assert isinstance(target, DnsTarget)
    (service,) = [s for s in objects(variant, "Service") if s["metadata"]["name"] == target.name]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert component_of(service) == "worker"
    assert [port["port"] for port in service["spec"]["ports"]] == [target.port]


def test_routers_find_workers_of_other_releases(in_force: Any) -> None:
    """Their names are those of the releases `small` and `large`."""
    targets = parse_targets(in_force("routers", "router")["workers"])
    result = template("-f", CHART / "ci" / "workers.yaml", release="small")
    assert result.returncode == 0, result.stderr
    (service,) = [o for o in yaml.safe_load_all(result.stdout) if o["kind"] == "Service"]
    assert service["metadata"]["name"] in {target.name for target in targets if isinstance(target, DnsTarget)}


def test_facades_find_routers_by_headless_service(in_force: Any) -> None:
    for variant, components in COMPONENTS_OF.items():
        if "facade" in components:
            options = in_force(variant, "facade")
            assert options["addresses"] == ("fissile-routers:50051",)
            assert options["router_metrics"] == ("fissile-routers:9464",)
            ports = {port["containerPort"] for port in container(variant, "router")["ports"]}
            assert {50051, 9464} <= ports
            assert (options["router_ca"] is not None) == (variant == "facade")


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
    asked = {
        probe["grpc"]["service"]
        for v, components in COMPONENTS_OF.items()
        for c in components
        if c != "facade"
        for probe in probes(v, c)
    }
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
    if component == "facade":
        assert readiness["httpGet"]["scheme"] == ("HTTPS" if options["tls_cert"] else "HTTP")
        assert {startup["tcpSocket"]["port"], liveness["tcpSocket"]["port"]} == {"http"}
        return
    # Those of Kubernetes speak no TLS.
    port = options["health_port"] if options["tls_cert"] else options["port"]
    assert port
    assert {probe["grpc"]["port"] for probe in (startup, readiness, liveness)} == {port}
    assert readiness["grpc"]["service"] == READINESS
    assert liveness["grpc"]["service"] == LIVENESS
    # A router without workers is to wait for them; a worker is given the time to load.
    assert startup["grpc"]["service"] == {"router": LIVENESS, "worker": READINESS}[component]
    if component == "worker":
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800


@each_pod
def test_grace_period_is_longer_than_drain(variant: str, component: str, in_force: Any) -> None:
    sleep = container(variant, component).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    options = in_force(variant, component)
    drain = DRAIN_PROPAGATION_S + options["drain_timeout" if component in ("worker", "rank") else "drain_timeout_s"]
    ending = 2 * SESSION_FLUSH_S + TELEMETRY_SHUTDOWN_S + ENGINE_JOIN_S
    assert pod(variant, component)["spec"]["terminationGracePeriodSeconds"] >= sleep + drain + ending + 2
    # Endpoints forget a router before it refuses calls; workers tell their routers themselves.
    assert (sleep > 0) == (component in ("router", "facade"))


def test_drain_timeout_of_values_reaches_programs(in_force: Any) -> None:
    assert in_force("routers", "router")["drain_timeout_s"] == 300
    assert in_force("workers", "worker")["drain_timeout"] == 0


@each_pod
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


@each_pod
def test_image_writes_only_to_volumes(variant: str, component: str) -> None:
    file = file_of(variant, component)
    mounted = {mount["mountPath"] for mount in container(variant, component)["volumeMounts"]}
    written = {file.environment[name] for name in ("HF_HOME",) if name in file.environment}
    assert written <= mounted
    volumes = {volume["name"] for volume in pod(variant, component)["spec"]["volumes"]}
    claims = workload(variant, component)["spec"].get("volumeClaimTemplates", ())
    volumes |= {claim["metadata"]["name"] for claim in claims}
    assert {mount["name"] for mount in container(variant, component)["volumeMounts"]} == volumes


@each_pod
def test_pod_has_own_service_account_and_priority_class(variant: str, component: str) -> None:
    spec = pod(variant, component)["spec"]
    accounts = {o["metadata"]["name"]: o for o in objects(variant, "ServiceAccount")}
    assert accounts[spec["serviceAccountName"]]["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == f"fissile-{component.replace('rank', 'worker')}"
    made = {o["metadata"]["name"] for o in objects(variant, "PriorityClass")}
    assert made == (set() if variant == "workers" else {spec["priorityClassName"]})


@each_pod
def test_pod_empty_dirs_have_size_limit(variant: str, component: str) -> None:
    """Without a limit a Pod could fill its node's disk."""
    volumes = pod(variant, component)["spec"]["volumes"]
    assert [v["name"] for v in volumes if "emptyDir" in v and "sizeLimit" not in v["emptyDir"]] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_unready_pod_does_not_block_node_drain(variant: str) -> None:
    budgets = objects(variant, "PodDisruptionBudget")
    ranks = {"rank"} if objects(variant, "LeaderWorkerSet") else set()
    counted = [labels["app.kubernetes.io/component"] for budget in budgets for labels in budgeted(budget)]
    assert sorted(counted) == sorted({*COMPONENTS_OF[variant]} | ranks)
    assert {o["spec"]["unhealthyPodEvictionPolicy"] for o in budgets} == {"AlwaysAllow"}


@each_pod
def test_services_set_no_options(variant: str, component: str) -> None:
    """Kubernetes sets NAME_PORT=tcp://... for Services; FISSILE_PORT and FISSILE_WORKER_PORT are options."""
    assert pod(variant, component)["spec"]["enableServiceLinks"] is False


@each_worker
def test_worker_options_fit_container_limits(variant: str, in_force: Any) -> None:
    """Without options a worker takes a quarter of the machine's free memory and all cores, not the Pod's share."""
    options = in_force(variant, "worker")
    resources = container(variant, "worker")["resources"]
    number, unit = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti)", resources["limits"]["memory"]).groups()  # type: ignore[union-attr]
    assert options["kv_cache_memory"] + GIB <= int(number) * UNITS[unit]
    assert options["threads"] == int(resources["requests"]["cpu"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_permitted_callers_connect(variant: str, in_force: Any) -> None:
    policies = {component_of(policy): policy["spec"] for policy in objects(variant, "NetworkPolicy")}
    ranks = {"rank"} if variant == "groups" else set()
    assert policies.keys() == {*COMPONENTS_OF[variant]} | ranks
    for component in COMPONENTS_OF[variant]:
        policy = policies[component]
        assert selected(policy["podSelector"]["matchLabels"], variant) == [component]
        assert policy["policyTypes"] == ["Ingress"]
        ports = [port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())]
        assert ports == [port["name"] for port in container(variant, component)["ports"]]
        for rule in policy["ingress"]:
            if [port["port"] for port in rule.get("ports", ())] == ["metrics"]:
                assert rule["from"] == [{"namespaceSelector": {}}]
            if [port["port"] for port in rule.get("ports", ())] == ["scaler"]:
                (source,) = rule["from"]
                assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "keda"}
    if "worker" in policies:
        source, *callers = policies["worker"]["ingress"][0]["from"]
        assert callers == ([{"podSelector": {"matchLabels": {"app": "dynamo"}}}] if variant == "workers" else [])
        assert source.keys() == {"podSelector"}
        labels = source["podSelector"]["matchLabels"]
        if "router" in policies:
            assert selected(labels, variant) == ["router"]
        else:
            assert labels["app.kubernetes.io/component"] == "router"
    if "router" in policies:
        options = in_force(variant, "router")
        assert options["admin_host"] == "127.0.0.1"
        assert options["admin_port"] not in {port["containerPort"] for port in container(variant, "router")["ports"]}


@each_worker
def test_only_a_store_of_workers_lets_workers_reach_each_other(variant: str) -> None:
    """Mooncake moves blocks between workers, of prefills and of decodes, at ports that it picks."""
    (policy,) = [policy["spec"] for policy in objects(variant, "NetworkPolicy") if component_of(policy) == "worker"]
    everywhere = [rule["from"] for rule in policy["ingress"] if "ports" not in rule]
    workers = [each for sources in everywhere for each in sources if matches_pod(each, variant, "worker")]
    assert len(workers) == (1 if variant == "workers" else 0)
    # Those of other releases too.
    assert all("app.kubernetes.io/instance" not in each["podSelector"]["matchLabels"] for each in workers)


def matches_pod(peer: Object, variant: str, component: str) -> bool:
    return matches(peer["podSelector"]["matchLabels"], variant, component)


def test_only_pods_of_a_group_reach_its_ranks() -> None:
    policies = {component_of(policy): policy["spec"] for policy in objects("groups", "NetworkPolicy")}
    (rule,) = policies["rank"]["ingress"]
    sources = [source["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for source in rule["from"]]
    assert sources == ["worker", "rank"]
    (source,) = policies["worker"]["ingress"][-1]["from"]
    assert source["podSelector"]["matchLabels"].items() <= pod("groups", "rank")["metadata"]["labels"].items()


@pytest.mark.parametrize(("variant", "resource", "count"), [
    ("rocm", "amd.com/gpu", "1"), ("nvidia", "nvidia.com/gpu", "2"), ("groups", "amd.com/gpu", "8"),
])  # fmt: skip
def test_workers_ask_for_their_gpus(variant: str, resource: str, count: str) -> None:
    for role in ("worker", "rank") if variant == "groups" else ("worker",):
        resources = container(variant, role)["resources"]
        assert resources["limits"][resource] == resources["requests"][resource] == count
        keys = [toleration["key"] for toleration in pod(variant, role)["spec"]["tolerations"]]
        assert keys[0] == resource
        groups = pod(variant, role)["spec"]["securityContext"].get("supplementalGroups", [])
        assert groups == ([44, 109] if resource == "amd.com/gpu" else [])


@pytest.mark.parametrize(
    ("variant", "component"), [(v, c) for v, components in COMPONENTS_OF.items() for c in components if c in MTLS]
)
def test_certificates_are_mounted_from_secret(variant: str, component: str, in_force: Any) -> None:
    options = in_force(variant, component)
    files = {value for value in options.values() if isinstance(value, Path) and value.suffix in (".crt", ".key")}
    volumes = {v["name"] for v in pod(variant, component)["spec"]["volumes"] if v["name"] == "tls"}
    if not volumes:
        assert files == set()
        return
    (folder,) = (m["mountPath"] for m in container(variant, component)["volumeMounts"] if m["name"] == "tls")
    assert {str(path.parent) for path in files} == {folder}
    assert {path.name for path in files} == {"tls.crt", "tls.key", "ca.crt"}
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
    """The certificates have the names of cert-manager's objects, and the processes have the options of the chart."""
    authority = Authority(tmp_path)
    names = {component_of(o): o["spec"]["dnsNames"] for o in objects("mtls", "Certificate")}
    for component in MTLS:
        folder = tmp_path / component
        folder.mkdir()
        pair = authority.issue(component, *names[component])
        for source, name in ((pair.cert, "tls.crt"), (pair.key, "tls.key"), (authority.cert, "ca.crt")):
            shutil.copy(source, folder / name)
    own = {"worker", "metrics-port", "admin-port", "health-port"}
    options = yaml.safe_load(router_configuration("mtls"))["router"]
    kept = {name: value for name, value in options.items() if name not in own}
    text = yaml.safe_dump({"router": kept}).replace("/etc/fissile-tls", str(tmp_path / "router"))
    (tmp_path / "router.yaml").write_text(text)
    said = {name: value for name, value in environment("mtls", "worker").items() if "TLS" in name or "IDENTITY" in name}
    said = {name: value.replace("/etc/fissile-tls", str(tmp_path / "worker")) for name, value in said.items()}
    model = ["--model", str(simulated_model(tmp_path / "model")), *OPTIONS]
    with (
        started("worker", tmp_path, said, *model) as worker,
        started(
            "router", tmp_path, {}, "--config", str(tmp_path / "router.yaml"), "--worker", worker.address
        ) as router,
    ):
        worker.wait_serving(READINESS)
        router.wait_serving(READINESS)


@pytest.mark.parametrize("variant", ["base", "groups"])
def test_plain_manifests_are_the_chart_with_its_values(variant: str) -> None:
    """After a change, in deploy, for each VARIANT:
    helm template fissile helm/fissile -f helm/fissile/ci/VARIANT.yaml > kubernetes/VARIANT/fissile.yaml
    """
    result = template("-f", CHART / "ci" / f"{variant}.yaml")
    assert result.returncode == 0, result.stderr
    assert result.stdout == (DEPLOY / "kubernetes" / variant / "fissile.yaml").read_text("utf-8")


@pytest.mark.parametrize("variant", ["base", "groups"])
def test_kustomization_has_all_plain_manifests(variant: str) -> None:
    result = run([tool("kubectl"), "kustomize", DEPLOY / "kubernetes" / variant])
    assert result.returncode == 0, result.stderr

    def key(found: Object) -> tuple[str, str]:
        return found["kind"], found["metadata"]["name"]

    made = sorted(yaml.safe_load_all(result.stdout), key=key)
    assert made == sorted(all_objects(variant), key=key)
