"""The service that is attacked, and what must hold of it afterwards."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc

from photon_grpc.v1 import inference_pb2, inference_pb2_grpc
from tests.service.running import RunningService, client, started, wait_until

#: The context, and the whole KV cache: any request ends soon, and one request can need every block there is.
CONTEXT = 256
NUM_SLOTS = 8
BLOCK_SIZE = 16
FLAGS = (
    *("--max-model-len", str(CONTEXT)),
    *("--block-size", str(BLOCK_SIZE)),
    *("--num-blocks", str(CONTEXT // BLOCK_SIZE)),
    *("--max-num-seqs", str(NUM_SLOTS)),
    *("--max-num-batched-tokens", "48"),
)
_PROMPT = "def fib(n):"
#: What is on stderr only if something of ours broke.
_BAD_SIGNS = ("lost", "Traceback", "internal error", '"code": "INTERNAL"', '"code": "UNKNOWN"')


class Victim:
    """A service on the embedded model with few slots, few blocks and small steps."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.address = service.wait_ready()[0]
        #: Of AdminService.
        self.admin = next(line for line in service.lines if "admin service on " in line).split("admin service on ")[1]
        #: /healthz of its supervisor; empty without --metrics-listen.
        metrics = next((line for line in service.lines if "metrics on " in line), "")
        self.liveness = metrics.partition("metrics on ")[2].replace("/metrics", "/healthz")
        self._expected = self._normal_answer()

    def pids(self) -> dict[str, int]:
        """`engine`, `frontend` -> process id."""
        return self.service.children()

    def methods(self) -> list[MethodDescriptor]:
        """Of every service that reflection lists, as the server describes them."""
        with grpc.insecure_channel(self.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            pool = DescriptorPool(database)
            services = [pool.FindServiceByName(name) for name in database.get_services()]
            return [method for service in services for method in service.methods]

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """After the block the same processes run, have not complained, and say to a greedy request what they said
        before any attack."""
        pids, num_lines = self.pids(), len(self.service.lines)
        yield
        assert self.pids() == pids, self.complaint()
        assert self.says_what_it_said()
        assert not self.bad_signs(num_lines)

    def says_what_it_said(self) -> bool:
        return self._normal_answer() == self._expected

    def owns_nothing(self) -> None:
        """A request that needs every block there is gets them, which it does only if nobody else owns one."""
        assert self._whole_cache() == CONTEXT

    def bad_signs(self, since: int = 0) -> list[str]:
        return [line for line in self.service.lines[since:] if any(sign in line for sign in _BAD_SIGNS)]

    def complaint(self) -> str:
        return "\n".join(self.service.lines[-40:])

    def _normal_answer(self) -> str:
        with client(self.address) as call:
            return call.generate(_PROMPT, max_tokens=12).outputs[0].text

    def _whole_cache(self) -> int:
        """Tokens of a request that goes on to the end of the context."""
        request = inference_pb2.GenerateRequest(text=_PROMPT)
        request.output.token_ids = True
        request.stop.ignore_eos = True
        with grpc.insecure_channel(self.address) as channel:
            response = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
        return response.usage.prompt_tokens + response.usage.output_tokens


@contextlib.contextmanager
def victim(*flags: str, limit_descriptors: int | None = None) -> Iterator[Victim]:
    command = [
        sys.executable,
        "-m",
        "photon_grpc",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--device",
        "cpu",
        *FLAGS,
        *flags,
    ]
    if limit_descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {limit_descriptors}; exec "$@"', "sh", *command]
    with started(command) as service:
        yield Victim(service)


def service_set(folder: Path) -> str:
    """The descriptor set of hostile.proto, compiled into `folder`."""
    here, path = Path(__file__).parent, folder / "hostile.binpb"
    include = [f"-I{each}" for each in (here, here.parents[1] / "protos", files("grpc_tools") / "_proto")]
    given = ["--include_imports", f"--descriptor_set_out={path}", "hostile.proto"]
    assert protoc.main(["protoc", *include, *given]) == 0
    return str(path)


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def empty_request(method: MethodDescriptor) -> Message:
    return message_factory.GetMessageClass(method.input_type)()


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def memory_mib(pid: int, what: str = "VmRSS") -> float:
    """`VmRSS`, or the most since `forget_peak`: `VmHWM`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Belongings:
    """Open files and memory of the processes before an attack, and what has come to them since."""

    def __init__(self, victim: Victim) -> None:
        self._pids = victim.pids()
        self._descriptors = {role: num_descriptors(pid) for role, pid in self._pids.items()}
        self._memory_mib = {role: memory_mib(pid) for role, pid in self._pids.items()}

    def return_to_what_they_were(self, spare: int = 4) -> None:
        """Waits until every process has as many files open as before, and `spare` more at most."""
        for role, pid in self._pids.items():
            wait_until(
                lambda role=role, pid=pid: num_descriptors(pid) <= self._descriptors[role] + spare,
                f"{role}: {self._descriptors[role]} files were open before",
                30,
            )

    def grown_mib(self) -> float:
        return max(memory_mib(pid) - self._memory_mib[role] for role, pid in self._pids.items())

    def told(self) -> str:
        """`frontend +0 files +3 MiB, engine …`."""
        return ", ".join(
            f"{role} {num_descriptors(pid) - self._descriptors[role]:+d} files "
            f"{memory_mib(pid) - self._memory_mib[role]:+.0f} MiB"
            for role, pid in sorted(self._pids.items(), reverse=True)
        )
