"""Sums over ranks of many rows, which ranks share out: the bits of those that every rank adds by itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from photon_grpc.bridge.heartbeat import shared_file
from tests.service.running import ROOT

#: Forks the ranks: what they import, which takes seconds, is imported once.
PROGRAM = """
    import os, sys, torch
    from photon_grpc.layers.epilogues import Parts
    from photon_grpc.layers.parallel import processes
    from photon_grpc.layers.parallel.group import MeshSizes, add_gathered

    def add_all(rank, file, size):
        processes.SHARED_ROWS = 4
        mesh = processes.ProcessMesh(rank, MeshSizes(size), file)
        mesh.join(torch.device("cpu"), 16)
        group = mesh.mesh.tp
        for dtype in (torch.float32, torch.bfloat16):
            for num_rows in (1, 3, 4, 6, 7, 11):
                for bias in (None, torch.randn(16, generator=torch.Generator().manual_seed(9)).to(dtype)):
                    start = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
                    part = torch.randn(num_rows, 16, generator=torch.Generator().manual_seed(rank))
                    expected, found = start.clone(), start.clone()
                    add_gathered(group, expected, part, bias)
                    assert not group.add(found, Parts(part.__getitem__), bias, torch.empty(0), 0)
                    assert torch.equal(found, expected), (rank, dtype, num_rows)
        mesh.leave()
        os.write(1, b"equal ")

    file, size = map(int, sys.argv[1:])
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if not ranks[-1]:
            add_all(rank, file, size)
            os._exit(0)
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
"""


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_rows_that_ranks_share_out_have_the_bits_of_those_that_all_add(num_ranks: int) -> None:
    file = shared_file("rendezvous")
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(file), str(num_ranks)]
    ranks = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=(file,), timeout=240)
    assert (ranks.returncode, ranks.stdout.split()) == (0, ["equal"] * num_ranks)
