"""Sums over ranks of many rows, which ranks share out: the bits of those that every rank adds by itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from photon_grpc.bridge.heartbeat import shared_file
from tests.service.running import ROOT

PROGRAM = """
    import sys, torch
    from photon_grpc.layers.ends import Parts
    from photon_grpc.layers.parallel import processes
    from photon_grpc.layers.parallel.group import MeshSizes, add_gathered

    rank, file, size = map(int, sys.argv[1:])
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
    print("equal")
"""


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_rows_that_ranks_share_out_have_the_bits_of_those_that_all_add(num_ranks: int) -> None:
    file, program = shared_file("rendezvous"), textwrap.dedent(PROGRAM)
    commands = [[sys.executable, "-c", program, str(rank), str(file), str(num_ranks)] for rank in range(num_ranks)]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=(file,)) for command in commands
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["equal"] * num_ranks
