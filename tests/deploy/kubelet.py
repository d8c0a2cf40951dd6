"""A kubelet for a Deployment, to show the effect of its end on a stream.

It runs the container as processes of this machine, probes them as in the manifest (tests/service/kubelet.py), and ends
them as a node ends a pod.

    python -m tests.deploy.kubelet [docs/deploy/kubernetes/base/deployment.yaml]

Ports are replaced by free ones, mounts by temporary directories; `securityContext` and `resources` are ignored
(tests/deploy/test_confinement.py tests those that need no cluster).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import yaml

from photon_grpc.v1 import inference_pb2, inference_pb2_grpc
from tests.deploy.dockerfile import Dockerfile
from tests.service.kubelet import Kubelet, Probe, grpc_serves
from tests.service.running import WITH_MODEL

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENT = ROOT / "docs" / "deploy" / "kubernetes" / "base" / "deployment.yaml"


class Pod:
    """One pod of a Deployment, its only container running here."""

    def __init__(self, deployment: Mapping[str, Any], directory: Path, program: Sequence[str]) -> None:
        self._spec = deployment["spec"]["template"]["spec"]
        (self._container,) = self._spec["containers"]
        self._directory = directory
        self._ports = {port["containerPort"]: free_port() for port in self._container["ports"]}
        self._names = {port["name"]: port["containerPort"] for port in self._container["ports"]}
        command = [*program, *(self._here(argument) for argument in self._container["args"])]
        self._process = subprocess.Popen(command, cwd=ROOT, env=self._environment())
        self.kubelet = Kubelet(self._process)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports[self._names['grpc']]}"

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Start the pod; probe readiness and liveness until the end of the block.

        Raise TimeoutError if the startup probe fails, after which a kubelet would restart the container.
        """
        try:
            self.kubelet.until_started(self._probe("startupProbe"))
            with self.kubelet.probing(self._probe("readinessProbe"), self._probe("livenessProbe")):
                yield
        finally:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def wait_ready(self, limit_s: float = 240.0) -> None:
        """Until a Service would send calls here."""
        give_up_s = time.monotonic() + limit_s
        while "ready" not in self.kubelet.told:
            if time.monotonic() > give_up_s or self._process.poll() is not None:
                raise TimeoutError("never ready")
            time.sleep(0.02)

    def terminate(self) -> int:
        """preStop, SIGTERM, what is left of the grace period, SIGKILL; return the exit code."""
        hook = self._container["lifecycle"]["preStop"]["exec"]["command"]
        return self.kubelet.delete(
            lambda: subprocess.run(hook, check=True), self._spec["terminationGracePeriodSeconds"]
        )

    # Probes.

    def _probe(self, name: str) -> Probe:
        probe = self._container[name]
        return Probe(partial(self._succeeds, probe), probe["periodSeconds"], probe["failureThreshold"])

    def _succeeds(self, probe: Mapping[str, Any]) -> bool:
        timeout_s = probe["timeoutSeconds"]
        if "grpc" in probe:
            asked = probe["grpc"]
            return grpc_serves(f"127.0.0.1:{self._ports[asked['port']]}", asked.get("service", ""), timeout_s)
        if "httpGet" in probe:
            return self._http_is_ok(probe["httpGet"], timeout_s)
        command = [self._here(word) for word in probe["exec"]["command"]]
        return subprocess.run(command, timeout=timeout_s, env=self._environment()).returncode == 0

    def _http_is_ok(self, asked: Mapping[str, Any], timeout_s: float) -> bool:
        port = self._ports[self._names.get(asked["port"], asked["port"])]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{asked['path']}", timeout=timeout_s) as answer:
                return bool(200 <= answer.status < 400)
        except (urllib.error.URLError, OSError):
            return False

    # The container's view of the machine, and ours.

    def _environment(self) -> dict[str, str]:
        """Of the image, then of the manifest; nothing of this process but what finds Python and its packages."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV") if name in os.environ}
        told = {entry["name"]: entry["value"] for entry in self._container.get("env", [])}
        image = {name: value for name, value in Dockerfile.read().environment("cpu").items() if name != "PATH"}
        return (
            kept | {name: self._here(value) for name, value in (image | told).items()} | {"TMPDIR": self._here("/tmp")}
        )

    def _here(self, text: str) -> str:
        """Ports and mounts of the container as they are here."""
        places = {f"0.0.0.0:{port}": f"127.0.0.1:{free}" for port, free in self._ports.items()}
        for mount in self._container["volumeMounts"]:
            local = self._directory / mount["name"]
            local.mkdir(exist_ok=True)
            places[mount["mountPath"]] = str(local)
        # In one go: what is put in may hold what is looked for.
        return re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], text)


class Stream:
    """A long StreamGenerate, read in a thread; ends with the reason that the server gave."""

    def __init__(self, channel: grpc.Channel, num_tokens: int) -> None:
        request = inference_pb2.GenerateRequest(text="def")
        request.stop.max_tokens = request.stop.min_tokens = num_tokens
        request.output.token_ids = True
        self._call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request)
        self.num_tokens = 0
        self.began = threading.Event()
        self.code: grpc.StatusCode | None = None
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in self._call:
                self.num_tokens += sum(len(delta.token_ids) for delta in message.deltas)
                self.began.set()
        self.code, self.ended_s = self._call.code(), time.monotonic()

    def wait(self, limit_s: float = 120.0) -> None:
        self._thread.join(limit_s)


@contextlib.contextmanager
def pod_of(deployment: Mapping[str, Any], program: Sequence[str] = WITH_MODEL) -> Iterator[Pod]:
    """Yield a pod that has been started; `program`: the image's entry point, without the image."""
    with TemporaryDirectory() as directory:
        pod = Pod(deployment, Path(directory), program)
        with pod.started():
            yield pod


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: list[str]) -> int:
    deployment = yaml.safe_load(Path(arguments[0] if arguments else DEPLOYMENT).read_text())
    with pod_of(deployment) as pod:
        pod.wait_ready()
        with grpc.insecure_channel(pod.address) as channel:
            stream = Stream(channel, num_tokens=4000)
            stream.began.wait()
            code = pod.terminate()
            stream.wait()
    ended = (stream.ended_s, f"the stream that was open ended: {stream.num_tokens} tokens, {stream.code}")
    events = sorted([*pod.kubelet.events, ended])
    for when_s, what in events:
        print(f"{when_s - events[0][0]:7.2f} s  {what}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
