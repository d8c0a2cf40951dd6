"""The whole service over gRPC while its processes are killed, drained and doubled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from photon_grpc import demo
from tests.service.running import NOT_SERVING, READINESS, SERVING, client, is_alive, modelless, serving, wait_until
from tests.service.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("service") / "tiny")


@pytest.fixture(scope="module")
def service(model):
    """One for the tests of this module, each of which leaves it ready, but the last, which ends it."""
    with modelless(*flags(model)) as service:
        service.wait_ready()
        yield service


@pytest.fixture
def call(service):
    with client(service.wait_ready()[0]) as call:
        yield call


@pytest.fixture(scope="module")
def service_of_model(model):
    with serving(*flags(model)) as service:
        service.wait_ready()
        yield service


@pytest.fixture
def call_of_model(service_of_model):
    with client(service_of_model.wait_ready()[0]) as call:
        yield call


def flags(model: Path) -> list[str]:
    return ["--model", str(model), "--load-format", "dummy", "--num-blocks", "512"]


def reason_of(error: grpc.RpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    for detail in rpc_status.from_call(error).details:
        if detail.Unpack(info):
            return info.reason
    return ""


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_service_generates_and_each_process_has_only_what_is_its_own(service_of_model, call_of_model):
    service, call = service_of_model, call_of_model
    response = call.generate("def fib", max_tokens=5)
    assert response.usage.output_tokens == 5
    assert response.model == "tiny"
    assert call.generate("def fib", max_tokens=5).outputs == response.outputs
    children = service.children()
    assert "libtorch" in mapped_files(children["engine"])
    assert "libtorch" not in mapped_files(children["frontend"])
    assert "grpc/_cython" in mapped_files(children["frontend"])
    assert "libtorch" not in mapped_files(service.process.pid)
    assert "grpc/_cython" not in mapped_files(service.process.pid)


@pytest.mark.parametrize(
    ("module", "foreign"),
    [
        ("photon_grpc.service.processes.frontend", {"torch", "transformers", "triton", "numpy"}),
        ("photon_grpc.service.processes.encoder", {"torch", "transformers", "triton", "numpy", "grpc", "google"}),
        (
            "photon_grpc.service.supervisor",
            {"torch", "transformers", "triton", "numpy", "grpc", "google", "tokenizers"},
        ),
    ],
)
def test_modules_of_a_process_import_nothing_foreign(module, foreign):
    program = f"import {module}, sys; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert module in output.split()
    assert not foreign & set(output.split())


def test_a_killed_engine_fails_what_runs_and_is_replaced(service_of_model, call_of_model):
    service, call = service_of_model, call_of_model
    times = len(service.ready_lines())
    stream = call.stream()
    next(stream)
    engine = service.children()["engine"]
    os.kill(engine, signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as failure:
        list(stream)
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert reason_of(failure.value) == "ENGINE_FAILURE"
    assert call.health(READINESS) == NOT_SERVING
    assert call.health("") == SERVING
    with pytest.raises(grpc.RpcError) as failure:
        call.generate()
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert reason_of(failure.value) == "ENGINE_RESTARTING"
    service.wait_ready(times + 1)
    assert call.health(READINESS) == SERVING
    assert call.generate().usage.output_tokens == 4
    assert service.children()["engine"] != engine


def test_an_engine_of_tests_without_a_model_imports_no_torch(service):
    service.wait_ready()
    assert "libtorch" not in mapped_files(service.children()["engine"])


def test_a_killed_front_end_is_replaced_where_it_was(service, call):
    times = len(service.ready_lines())
    address = service.wait_ready()
    stream = call.stream()
    next(stream)
    before = service.children()
    (encoder,) = children_of(before["frontend"])
    os.kill(before["frontend"], signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as failure:
        list(stream)
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert service.wait_ready(times + 1) == address
    assert call.generate(wait_for_ready=True).usage.output_tokens == 4
    after = service.children()
    assert after["engine"] == before["engine"]
    assert after["frontend"] != before["frontend"]
    wait_until(lambda: not is_alive(encoder), "the encoder of the front end that was killed ends")


@pytest.mark.slow
def test_a_stopped_engine_fails_what_runs_and_is_replaced(service, call):
    times = len(service.ready_lines())
    stream = call.stream(max_tokens=4000)
    next(stream)
    engine = service.children()["engine"]
    os.kill(engine, signal.SIGSTOP)
    with pytest.raises(grpc.RpcError) as failure:
        list(stream)
    assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
    assert reason_of(failure.value) == "ENGINE_FAILURE"
    assert call.health(READINESS) == NOT_SERVING
    # The five seconds that it is allowed were counted in ticks; the deadline of the call is a hundred.
    assert any("5.0 s were allowed" in line for line in service.lines), service.lines
    service.wait_ready(times + 1)
    assert call.generate().usage.output_tokens == 4
    assert not is_alive(engine)


@pytest.mark.slow
def test_an_idle_engine_and_a_front_end_that_are_stopped_are_replaced(service, call):
    call.generate()
    times = len(service.ready_lines())
    before = service.children()
    for pid in before.values():
        os.kill(pid, signal.SIGSTOP)
    service.wait_ready(times + 1)
    assert call.generate(wait_for_ready=True).usage.output_tokens == 4
    assert not any(map(is_alive, before.values()))
    assert service.children().keys() == before.keys()


def test_a_second_service_does_not_share_the_port(service, model):
    with modelless(*flags(model), "--listen", service.wait_ready()[0]) as second:
        assert second.process.wait() == 2
        second._reading.join()
    text = "\n".join(second.lines)
    assert service.wait_ready()[0] in text
    assert "in use" in text
    assert "--listen" in text
    assert "Traceback" not in text


def test_a_model_that_cannot_be_loaded_is_named_once(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with serving("--model", str(tmp_path), "--load-format", "dummy") as broken:
        assert broken.process.wait() == 2
        broken._reading.join()
    text = "\n".join(broken.lines)
    assert text.count("NoSuchModel") == 1
    assert "Traceback" not in text


def test_a_truncated_checkpoint_ends_the_start_and_names_its_file(tmp_path):
    model = shutil.copytree(demo.DRAFT, tmp_path / "model")
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with serving("--model", str(model)) as broken:
        assert broken.process.wait() == 2
        broken._reading.join()
    (line,) = [line for line in broken.lines if "model.safetensors" in line]
    assert "not fully covered" in line
    assert "Traceback" not in "\n".join(broken.lines)


def test_sigterm_lets_a_running_stream_finish(service, call):
    stream = call.stream(max_tokens=1500)
    next(stream)
    service.process.send_signal(signal.SIGTERM)
    wait_until(lambda: call.health(READINESS) == NOT_SERVING, "draining")
    with pytest.raises(grpc.RpcError) as failure:
        call.generate()
    assert reason_of(failure.value) == "DRAINING"
    last = list(stream)[-1]
    assert last.usage.output_tokens == 1500
    pids = service.pids()
    assert service.process.wait() == 0
    assert not any(map(is_alive, pids))


def test_two_front_ends_share_a_port_and_die_with_their_supervisor(model, tmp_path):
    path = tmp_path / "photon.sock"
    with modelless(*flags(model), "--listen", f"unix:{path}", "--frontends", "2") as service:
        tcp, unix = service.wait_ready()
        assert unix == f"unix:{path}"
        for address in (tcp, unix):
            with client(address) as call:
                assert call.generate().usage.output_tokens == 4
        pids = service.pids()
        assert len(pids) == 3
        service.end(signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, pids)), "children are gone")


def test_ctrl_c_ends_in_order_and_removes_the_unix_socket(model, tmp_path):
    path = tmp_path / "photon.sock"
    with modelless(*flags(model), "--listen", f"unix:{path}") as service:
        service.wait_ready()
        pids = service.pids()
        assert service.end(signal.SIGINT) == 0
        assert not path.exists()
        assert not any(map(is_alive, pids))
