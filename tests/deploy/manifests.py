"""The files of docs/deploy as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
PATCHES = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.parent.name not in ("base", "kubernetes"))


def read(path: Path) -> Any:
    """Return the only document of a YAML file."""
    return yaml.safe_load(path.read_text())


def base(name: str) -> Any:
    """`deployment`, `service`, ..."""
    return read(KUBERNETES / "base" / f"{name}.yaml")


def pod_spec(manifest: Mapping[str, Any]) -> Any:
    """Of a Pod, a Deployment, or a patch of one."""
    spec = manifest["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def containers(manifest: Mapping[str, Any]) -> Iterator[Any]:
    """Those that run the service."""
    spec = pod_spec(manifest)
    every = (*spec.get("initContainers", ()), *spec["containers"])
    return (container for container in every if container["name"] == "photon")


def workloads() -> Iterator[tuple[Path, Any]]:
    """Every manifest and patch that has containers."""
    for path in sorted(KUBERNETES.rglob("*.yaml")):
        manifest = read(path)
        if manifest["kind"] in ("Deployment", "Pod"):
            yield path, manifest
