"""Ranks in processes of this machine: NCCL between CUDA devices, gloo on CPUs."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from photon_grpc.errors import StartupError
from photon_grpc.kernels.linear import slices
from photon_grpc.layers.epilogues import Parts, Pending
from photon_grpc.layers.parallel.group import Group, LoneRank, MeshSizes, add_gathered, mesh_of
from photon_grpc.layers.parallel.planes import Planes, shared_planes

#: For libraries that read them when a group begins: the loopback interface is enough, and no NVLink multicast.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
#: Longer than any step, and than the compilation of a kernel that one rank meets first. The end of a rank is noticed at
#: once, elsewhere.
TIMEOUT_S = 1800.0
#: From so many rows on, ranks share out the addition of rows.
SHARED_ROWS = 1024
#: For the meeting of ranks that are all about to join.
MEETING_S = 60.0


class ProcessGroup:
    """A group whose ranks rehearse alone until they are joined."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._alone = LoneRank(rank, size)
        self._group: Group = self._alone

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return self._group.gather(part)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Rehearse in this block."""
        before, self._group = self._group, self._alone
        try:
            yield
        finally:
            self._group = before

    def add(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int,
        pending: Pending | None = None,
    ) -> bool:  # fmt: skip
        return self._group.add(h, parts, bias, squares, site, pending)

    def join(self, joined: Joined) -> None:
        """Wait for the others from now on."""
        self._group = joined

    def leave(self) -> bool:
        """Compute alone again; return whether it was joined."""
        is_joined, self._group = self._group is not self._alone, self._alone
        return is_joined


class ProcessMesh:
    """All groups of this process, whose ranks rehearse alone until they join.

    Args:
        file: the number of a shared file, by which the ranks find each other.
    """

    #: The one that has, or will have, the groups of this process.
    _holder: ClassVar[weakref.ref[ProcessMesh] | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def refuse_another(cls) -> None:
        """Raise StartupError while there is one in this process: libraries have one set of groups."""
        if cls._holder is not None and cls._holder() is not None:
            raise StartupError(
                "another model of this program is computed by several ranks: close it first, or start another program"
            )

    def __init__(self, rank: int, sizes: MeshSizes, file: int) -> None:
        """Raise StartupError as refuse_another does."""
        with self._lock:
            self.refuse_another()
            ProcessMesh._holder = weakref.ref(self)
        self._file = file
        self._sizes = sizes
        self._on_cuda = False
        self._groups: list[ProcessGroup] = []
        self.mesh = mesh_of(rank, sizes, self._group)

    def _group(self, rank: int, size: int) -> ProcessGroup:
        self._groups.append(ProcessGroup(rank, size))
        return self._groups[-1]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Rehearse in this block."""
        with ExitStack() as stack:
            for group in self._groups:
                stack.enter_context(group.alone())
            yield

    def join(self, device: torch.device, hidden_size: int) -> None:
        """Meet the others; all ranks call it. From then on groups wait for them."""
        if dist.is_initialized():
            # Of an earlier model of this process, whose graphs are gone.
            self.abort()
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._on_cuda = on_cuda = device.type == "cuda"
        world, size = self.mesh.world, self.mesh.world.size
        # A meeting that failed has counted its group, by which stores are named.
        dist.distributed_c10d._world.group_count = 0
        store = dist.FileStore(f"/proc/self/fd/{self._file}", size)
        store.set_timeout(timedelta(seconds=MEETING_S))
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=store,
            rank=world.rank,
            world_size=size,
            # gloo connects with the timeout of its exchanges, NCCL with the store's.
            timeout=timedelta(seconds=TIMEOUT_S if on_cuda else MEETING_S),
            device_id=device if on_cuda else None,
        )
        stages = torch.arange(size).view(self._sizes.stages, -1)
        for group, rows in ((self.mesh.tp, stages), (self.mesh.pp, stages.t())):
            if isinstance(group, ProcessGroup) and group is not world:
                own, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timedelta(seconds=TIMEOUT_S))
                self._join(group, own, device, hidden_size)
        if isinstance(world, ProcessGroup):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), dist.group.WORLD)
            self._join(world, dist.group.WORLD, device, hidden_size)

    def _join(self, group: ProcessGroup, processes: Any, device: torch.device, hidden_size: int) -> None:
        """Join a group; sums over the ranks of a layer go by planes where they can."""
        planes = shared_planes(processes, device, hidden_size) if self._on_cuda and group is self.mesh.tp else None
        group.join(Joined(group.rank, group.size, processes, planes))

    def abort(self) -> None:
        """End what waits for a rank that has ended, from any thread."""
        with suppress(Exception):
            dist.distributed_c10d._abort_process_group()

    def leave(self) -> None:
        """Compute alone again, and let another one of this process begin; the others may have ended."""
        if self._holder is not None and self._holder() is self:
            ProcessMesh._holder = None
        is_joined = [group.leave() for group in self._groups]
        # The end of NCCL's group would wait for the others, and for graphs that were captured with it.
        if any(is_joined) and not self._on_cuda:
            with suppress(Exception):  # aborted before
                dist.destroy_process_group()


class Joined:
    """Ranks that have met."""

    def __init__(self, rank: int, size: int, group: Any, planes: Planes | None = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group
        self._planes = planes

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        parts = part.new_empty((self.size * part.numel(),))
        dist.all_gather_into_tensor(parts, part.contiguous().view(-1), group=self._group)
        return parts.view(self.size, *part.shape)

    def add(
        self, h: torch.Tensor, parts: Parts, bias: torch.Tensor | None, squares: torch.Tensor, site: int,
        pending: Pending | None = None,
    ) -> bool:  # fmt: skip
        if self._planes is not None and self._planes.take(h):
            self._planes.add(h, parts, bias, squares, site, pending)
            return True
        part = parts.whole
        shared = h.shape[0] - h.shape[0] % self.size if h.shape[0] >= SHARED_ROWS else 0
        if shared:
            self._add_shared(h[:shared], part[:shared], bias)
        return add_gathered(self, h[shared:], part[shared:], bias) if shared < h.shape[0] else False

    def _add_shared(self, h: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Add with the bits of `add_gathered`, each rank as many rows, which it hands on: 3 bytes are moved of 4."""
        parts = part.new_empty((self.size, part.shape[0] // self.size, part.shape[1]))
        dist.all_to_all_single(parts, part.view(parts.shape), group=self._group)
        own = h.view(parts.shape)[self.rank]
        slices.add_launch(own, parts, bias)
        dist.all_gather_into_tensor(h, own, group=self._group)
