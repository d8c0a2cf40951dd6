"""Recording and alert rules: they use existing metrics and fire as they should; the PodMonitor finds the pods."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any

import pytest

from photon_grpc.observe import metrics
from tests.deploy.manifests import DEPLOY, base, containers, read
from tests.docs.test_metrics_documents import NAMES

DIRECTORY = DEPLOY / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in read(DIRECTORY / "photon.rules.yaml")["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
#: Put there by Prometheus itself.
OF_THE_SCRAPE = {"instance", "job"}
_NAME = re.compile(r"[a-z_]+:[a-z0-9_:]+|\b(?:photon|grpc)_[a-z0-9_]+")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    expression = rule["expr"]
    asked = set(_NAME.findall(expression))
    assert asked and asked <= NAMES.keys() | RECORDED
    labels = set.union(set(OF_THE_SCRAPE), *(NAMES.get(name, set()) for name in asked))
    named = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
    for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression):
        named |= {label.strip() for label in group.split(",")}
    assert named <= labels
    reasons = {reason for value in re.findall(r'reason=~?"([^"]*)"', expression) for reason in value.split("|")}
    assert reasons <= set(metrics.REJECTED.known)


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) > 10
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    tests = read(DIRECTORY / "photon.rules.test.yaml")["tests"]
    fires = {alert["alertname"] for test in tests for alert in test.get("alert_rule_test", ()) if alert["exp_alerts"]}
    assert fires == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize(
    "command", [("check", "rules", "photon.rules.yaml"), ("test", "rules", "photon.rules.test.yaml")]
)
def test_promtool_agrees(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: apt install prometheus")
    done = subprocess.run([promtool, *command], cwd=DIRECTORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pod_monitor_finds_the_pods_and_their_port() -> None:
    monitor = read(DIRECTORY / "pod-monitor.yaml")
    labels = base("deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["spec"]["jobLabel"] in labels
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = containers(base("deployment"))
    assert endpoint["port"] in {port["name"] for port in container["ports"]}
    assert len(NAMES) * 20 < endpoint["sampleLimit"]
