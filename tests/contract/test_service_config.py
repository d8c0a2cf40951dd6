"""All clients and the docs hold the same service config: retries, load balancing and health checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import grpc
import pytest

from photon_grpc import client, errors
from photon_grpc.client.channel import service_config

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "clients" / "service_config.json"

#: Each client's copy, since Python's wheel, Go's module and Java's artifact cannot hold files from outside.
COPIES = {
    "python": ROOT / "photon_grpc" / "client" / "service_config.json",
    "go": ROOT / "clients" / "go",
    "java": ROOT / "clients" / "java" / "src",
}


@pytest.mark.parametrize("language", COPIES)
def test_a_client_carries_the_list_as_it_is(language: str) -> None:
    place = COPIES[language]
    if not place.exists():
        pytest.skip(f"there is no client in {language} here")
    copies = [place] if place.is_file() else sorted(place.rglob("service_config.json"))
    assert copies, f"no service_config.json below {place}"
    for copy in copies:
        assert copy.read_bytes() == LIST.read_bytes(), copy


def test_the_list_is_the_contract() -> None:
    config = json.loads(LIST.read_text())
    (method,) = config["methodConfig"]
    policy = method["retryPolicy"]
    assert set(policy["retryableStatusCodes"]) == {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"}
    assert policy["maxAttempts"] == 5
    assert config["loadBalancingConfig"] == [{"round_robin": {}}]
    assert config["healthCheckConfig"] == {"serviceName": "photon_grpc.v1.InferenceService"}
    services = {name["service"] for name in method["name"]}
    assert services == {"photon_grpc.v1.InferenceService", "photon_grpc.v1.ModelService"}


def test_python_calls_with_the_list() -> None:
    assert json.loads(service_config(4)) == json.loads(service_config(9)) == json.loads(LIST.read_text())
    assert json.loads(service_config(2))["methodConfig"][0]["retryPolicy"]["maxAttempts"] == 3
    assert json.loads(service_config(0)) == json.loads(LIST.read_text()) | {"methodConfig": []}


def test_docs_name_the_codes_and_the_number_of_attempts() -> None:
    retries = (ROOT / "docs" / "clients.md").read_text().split("## Retries and resume")[1].split("\n## ")[0]
    policy = json.loads(LIST.read_text())["methodConfig"][0]["retryPolicy"]
    codes = {code.name for code in grpc.StatusCode}
    assert set(re.findall(r"`([A-Z_]+)`", retries)) & codes == set(policy["retryableStatusCodes"])
    assert f"at most {policy['maxAttempts']} attempts" in retries


def test_docs_name_the_class_of_every_reason() -> None:
    table = (ROOT / "docs" / "clients.md").read_text().split("## Errors")[1].split("\n## ")[0]
    documented = dict(re.findall(r"^\| `([A-Z_]+)`[^|]*\| `(\w+)`", table, re.MULTILINE))
    raised = {
        cls.reason: cls.__name__
        for cls in _all_subclasses(errors.RequestError) | _all_subclasses(errors.Unavailable)
        if cls.__module__.startswith(("photon_grpc.errors", client.__name__))
    }
    assert documented == raised


def _all_subclasses(cls: type[errors.PhotonError]) -> set[type[errors.PhotonError]]:
    return {cls}.union(*(_all_subclasses(child) for child in cls.__subclasses__()))
