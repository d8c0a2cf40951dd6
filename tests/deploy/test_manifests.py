"""The files of docs/deploy agree with each other and with the program: ports, probes, flags, variables, labels, times.

Schemas are the business of `.ci/deploy`, which has a network to get the tools from.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from photon_grpc.cli import health as health_verb
from photon_grpc.cli.main import cli
from photon_grpc.config.resolve import CLIENT_VARIABLES, resolve
from photon_grpc.config.settings import settings
from photon_grpc.core.counts import Sums
from photon_grpc.core.stats import Load
from photon_grpc.observe.exposition import Snapshot
from photon_grpc.service.supervisor import _ENGINE_GRACE_S, _FRONTEND_GRACE_S
from tests.deploy.dockerfile import Dockerfile
from tests.deploy.manifests import DEPLOY, KUBERNETES, PATCHES, base, containers, pod_spec, read, workloads

VARIABLES = {setting.variable for setting in settings()} | set(CLIENT_VARIABLES)
#: What the processes get on top of the drain, by the supervisor.
END_S = _FRONTEND_GRACE_S + _ENGINE_GRACE_S

DEPLOYMENT = base("deployment")
(CONTAINER,) = containers(DEPLOYMENT)
COMPOSE = read(DEPLOY / "compose.yaml")
every_workload = pytest.mark.parametrize(
    ("path", "manifest"), list(workloads()), ids=lambda value: value.name if isinstance(value, Path) else ""
)


def resolved(words: Iterable[str], environment: Mapping[str, str] = {}) -> Any:
    """Return the settings of `serve` for a command line and its variables; fail if it would refuse them."""
    words = list(words)
    assert words[0] == "serve"
    given: dict[str, Any] = {}
    by_flag = {setting.flag: setting for setting in settings()}
    for word in words[1:]:
        flag, _, value = word.partition("=")
        setting = by_flag[flag]
        given[setting.name] = [*given.get(setting.name, []), value] if setting.many else value
    # The directory is there in the container only.
    given.pop("model", None)
    found = resolve(given, {name: value for name, value in environment.items() if name != "PHOTON_MODEL"})
    assert not found.warnings
    return found.config.server


def environment_of(container: Mapping[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container.get("env", [])}


@every_workload
def test_arguments_and_variables_are_settings(path: Path, manifest: Any) -> None:
    for container in containers(manifest):
        names = {name for name in environment_of(container) if name.startswith("PHOTON_")}
        assert names <= VARIABLES
        resolved(container.get("args", ["serve"]), environment_of(container))


def test_ports_are_those_that_the_service_listens_on() -> None:
    server = resolved(CONTAINER["args"])
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert server.listen == (f"0.0.0.0:{ports['grpc']}",)
    assert server.metrics_listen == f"0.0.0.0:{ports['metrics']}"
    assert str(ports["grpc"]) in Dockerfile.read().whole("cpu").of("EXPOSE")
    annotations = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["metrics"])
    (of_service,) = base("service")["spec"]["ports"]
    assert of_service["targetPort"] in ports and of_service["port"] == ports["grpc"]


def test_probes_ask_for_what_the_health_service_knows() -> None:
    """ "" is liveness, the service's name readiness; a wrong name is NOT_FOUND, for ever."""
    grpc_port = CONTAINER["ports"][0]["containerPort"]
    assert CONTAINER["readinessProbe"]["grpc"] == {"port": grpc_port, "service": "photon_grpc.v1.InferenceService"}
    assert CONTAINER["startupProbe"]["grpc"] == {"port": grpc_port}


def test_liveness_is_the_supervisors() -> None:
    """The port of gRPC is its callers', who may flood it; who is flooded is alive."""
    assert CONTAINER["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert "grpc" not in CONTAINER["livenessProbe"]


def test_probes_over_tls_ask_over_http_at_the_metrics_port() -> None:
    (container,) = containers(read(KUBERNETES / "components" / "tls" / "tls.yaml"))
    asked = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe")}
    assert {probe["port"] for probe in asked.values()} == {"metrics"}
    assert [asked[name]["path"] for name in asked] == ["/healthz", "/readyz"]
    assert all(container[name]["grpc"] is None for name in asked)
    assert "grpc" not in CONTAINER["livenessProbe"]


def test_the_grace_period_holds_the_hook_the_drain_and_the_end() -> None:
    grace_s = pod_spec(DEPLOYMENT)["terminationGracePeriodSeconds"]
    word, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    assert grace_s >= float(seconds) + resolved(CONTAINER["args"]).drain_timeout + END_S


def test_the_grace_periods_of_sidecar_compose_and_systemd_hold_the_drain_and_the_end() -> None:
    sidecar = read(KUBERNETES / "sidecar.yaml")
    (container,) = containers(sidecar)
    grace_s = sidecar["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= resolved(container["args"]).drain_timeout + END_S
    for service in served_by_compose():
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        assert grace_s >= resolved(service["command"]).drain_timeout + END_S
    unit = systemd_unit()
    drain_s = float(unit_environment()["PHOTON_DRAIN_TIMEOUT"])
    assert int(unit["Service"]["TimeoutStopSec"]) >= drain_s + END_S


def test_selectors_match_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    selectors = (
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        base("service")["spec"]["selector"],
        base("pdb")["spec"]["selector"]["matchLabels"],
    )
    assert all(selector.items() <= labels.items() for selector in selectors)
    target = base("hpa")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == (DEPLOYMENT["kind"], DEPLOYMENT["metadata"]["name"])


def test_the_service_is_headless() -> None:
    assert base("service")["spec"]["clusterIP"] == "None"


def test_the_autoscaler_owns_the_number_of_replicas() -> None:
    assert "replicas" not in DEPLOYMENT["spec"]
    spec = base("hpa")["spec"]
    assert 1 < spec["minReplicas"] < spec["maxReplicas"], "with one replica a disruption budget blocks every drain"


def test_the_autoscaler_reads_a_metric_that_is_served() -> None:
    (metric,) = base("hpa")["spec"]["metrics"]
    page, _ = Snapshot(Load(), Sums(), True).page("")
    assert f"\n{metric['pods']['metric']['name']} " in page.decode()


@every_workload
def test_what_is_written_to_is_mounted(path: Path, manifest: Any) -> None:
    """The root is read-only: what the image's variables name, and /tmp, must be volumes."""
    if path in PATCHES:
        return
    for container in containers(manifest):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", *Dockerfile.read().whole("cpu").of("VOLUME")} <= mounts


@every_workload
def test_mounts_are_volumes_and_users_are_those_of_the_image(path: Path, manifest: Any) -> None:
    spec = pod_spec(manifest)
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    if path not in PATCHES:
        uid = Dockerfile.read().whole("cpu").of("USER")[-1].partition(":")[0]
        assert spec["securityContext"]["runAsUser"] == int(uid)
        assert spec["securityContext"]["runAsNonRoot"] and not spec["enableServiceLinks"]


@pytest.mark.parametrize("path", [path for path in PATCHES if path.name != "kustomization.yaml"], ids=lambda p: p.name)
def test_patches_name_what_the_base_has(path: Path) -> None:
    patch = read(path)
    of_base = base(patch["kind"].lower())
    assert (patch["apiVersion"], patch["metadata"]["name"]) == (of_base["apiVersion"], of_base["metadata"]["name"])
    if patch["kind"] == "Deployment":
        assert [container["name"] for container in pod_spec(patch)["containers"]] == ["photon"]


@pytest.mark.parametrize("path", sorted(KUBERNETES.rglob("kustomization.yaml")), ids=lambda path: path.parent.name)
def test_kustomizations_list_every_file_beside_them(path: Path) -> None:
    kustomization = read(path)
    patches = [patch["path"] for patch in kustomization.get("patches", ())]
    listed = {*kustomization.get("resources", ()), *kustomization.get("components", ()), *patches}
    assert all((path.parent / name).exists() for name in listed)
    assert {other.name for other in path.parent.glob("*.yaml")} - {path.name} <= listed


def test_images_are_what_the_dockerfile_makes() -> None:
    stages = Dockerfile.read().stages
    images = {CONTAINER["image"], *(service["image"] for service in COMPOSE["services"].values())}
    (renamed,) = read(KUBERNETES / "gpu" / "kustomization.yaml")["images"]
    images.add(f"{renamed['name']}:{renamed['newTag']}")
    assert images == {f"photon-grpc:{target}" for target in ("cpu", "cuda")}
    assert {image.partition(":")[2] for image in images} <= set(stages)


def served_by_compose() -> list[Any]:
    return [service for service in COMPOSE["services"].values() if service["command"][0] == "serve"]


def test_compose_builds_the_targets_and_publishes_to_this_machine_only() -> None:
    for service in served_by_compose():
        assert service["image"] == f"photon-grpc:{service['build']['target']}"
        assert (DEPLOY / service["build"]["context"] / "Dockerfile").exists()
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert service["read_only"] and any(mount.startswith("/tmp") for mount in service["tmpfs"])
        assert any(volume.endswith(Dockerfile.read().whole("cpu").of("VOLUME")[0]) for volume in service["volumes"])


def systemd_unit() -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "photon-grpc.service")
    return unit


def unit_environment() -> dict[str, str]:
    lines = re.findall(r"^Environment=(\w+)=(.*)$", (DEPLOY / "photon-grpc.service").read_text(), re.MULTILINE)
    return dict(lines)


def test_the_unit_sets_settings_and_writes_only_where_systemd_makes_room() -> None:
    environment = unit_environment()
    ours = {name: value for name, value in environment.items() if name.startswith("PHOTON_")}
    resolved(["serve"], ours)
    name = systemd_unit()["Service"]["CacheDirectory"]
    for variable in ("HOME", "TRITON_CACHE_DIR", "HF_HOME"):
        assert environment[variable].startswith(f"/var/cache/{name}")
    # Its probe must be answered also where the ports speak TLS.
    assert ours["PHOTON_TARGET"] == f"unix:/run/{name}/grpc.sock"
    assert ours["PHOTON_TARGET"] in ours["PHOTON_LISTEN"].split(",")
    assert int(systemd_unit()["Service"]["RestartPreventExitStatus"]) == 2


@pytest.mark.parametrize(
    "command",
    [
        *re.findall(r"photon-grpc (health[^\n]*)", (DEPLOY / "photon-grpc.service").read_text()),
        *(
            " ".join(probe["exec"]["command"][1:])
            for container in containers(read(KUBERNETES / "sidecar.yaml"))
            for probe in (container["startupProbe"], container["livenessProbe"])
        ),
    ],
)
def test_commands_of_probes_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def ready(target: str, timeout_s: float) -> None:
        asked.append(target)

    monkeypatch.setattr(health_verb, "_wait", ready)
    assert CliRunner().invoke(cli, command.split()).exit_code == 0
    assert asked


def test_overlays_are_built_by_kustomize() -> None:
    """Where a kubectl is."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl")
    for directory in ("base", "gpu"):
        built = subprocess.run(
            [kubectl, "kustomize", KUBERNETES / directory], capture_output=True, text=True, check=True
        )
        kinds = [document["kind"] for document in yaml.safe_load_all(built.stdout)]
        assert sorted(kinds) == ["Deployment", "HorizontalPodAutoscaler", "PodDisruptionBudget", "Service"]
