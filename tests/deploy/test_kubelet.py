"""A pod of the Deployment, probed and ended as by a kubelet: it is ready when it is, and a stream outlives its end."""

from __future__ import annotations

from copy import deepcopy

import grpc

from tests.deploy.kubelet import Stream, pod_of
from tests.deploy.manifests import base
from tests.service.running import WITHOUT_MODEL


def test_a_pod_starts_serves_and_ends_in_order_and_an_open_stream_ends_well() -> None:
    deployment = deepcopy(base("deployment"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    # The rest is played as it stands there.
    container["lifecycle"]["preStop"]["exec"]["command"] = ["sleep", "0.1"]
    container["args"] += ["--device=cpu", "--num-blocks=64"]
    with pod_of(deployment, WITHOUT_MODEL) as pod:
        pod.wait_ready()
        with grpc.insecure_channel(pod.address) as channel:
            stream = Stream(channel, num_tokens=200)
            assert stream.began.wait(240)
            assert pod.terminate() == 0
            stream.wait()
    assert (stream.code, stream.num_tokens) == (grpc.StatusCode.OK, 200)
    when_s = {what: at_s for at_s, what in pod.kubelet.events}
    order = ["started", "ready", "preStop", "SIGTERM", "exit 0"]
    assert sorted(order, key=when_s.__getitem__) == order
    assert when_s["SIGTERM"] < stream.ended_s < when_s["exit 0"]
    assert set(when_s) <= {*order, "unready"}
