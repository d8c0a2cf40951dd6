"""With an empty cache this process compiles one kernel: the dry run finds the rest, compiled beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

# A process of its own: the kernels of this one are compiled.
PROGRAM = """
from triton import knobs
from photon_grpc.compose.assemble import assemble
from photon_grpc.config.flags import SchedulerConfig, ServeConfig

compiled, stages = [], []

def listener(*, src, cache_hit, **_):
    if not cache_hit:
        compiled.append(src.name)

knobs.compilation.listener = listener
config = ServeConfig(scheduler=SchedulerConfig(max_num_seqs=24))
assemble(config, lambda stage, done, total: stages.append((stage, done, total)))
kernels = [(done, total) for stage, done, total in stages if stage == "kernels"]
print(len(compiled), "compiled here", compiled)
print("precompiled", bool(kernels) and kernels[-1][0] == kernels[-1][1] > 10)
"""


def test_an_empty_cache_is_filled_by_a_dry_run(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    for compiled, precompiled in ((1, True), (0, False)):
        said = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert f"{compiled} compiled here" in said.stdout, said.stdout + said.stderr
        assert f"precompiled {precompiled}" in said.stdout


# What no step before the start has met, in a cache that has nothing.
UNFORESEEN = """
import torch
from photon_grpc.kernels.lang.jit import BEFORE_COMPILATION
from photon_grpc.kernels.swiglu import launch

told = []
BEFORE_COMPILATION.set(lambda: told.append(1))
for _ in range(2):
    launch(torch.ones(3, 128, dtype=torch.bfloat16, device="cuda"))
print(len(told), "told")
"""


def test_a_kernel_met_while_serving_is_announced_once(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", UNFORESEEN], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert said.stdout == "1 told\n", said.stdout + said.stderr
