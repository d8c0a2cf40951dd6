"""An `LLM` that has ended gives the device's memory back, however it ended."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from photon_grpc import LLM
from photon_grpc.errors import EngineFailure
from photon_grpc.runner.model_runner import ModelRunner

pytestmark = pytest.mark.gpu

MIB = 2**20
#: What stays with the process: workspaces of cuBLAS, a stream's each, and the code of loaded kernels.
REST = 128 * MIB


def opened() -> LLM:
    llm = LLM(device="cuda", gpu_memory_utilization=0.8, max_num_seqs=4, max_num_batched_tokens=256)
    assert llm.generate("def fib(n):", max_tokens=8)
    return llm


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def test_memory_is_given_back_by_every_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    opened().close()  # the context, workspaces and kernels
    free, allocated = free_bytes(), torch.cuda.memory_allocated()
    for end in ("close", "drop", "crash", "close"):
        llm = opened()
        assert free - free_bytes() > 1024 * MIB
        stream = llm.stream("a", max_tokens=2000, ignore_eos=True)
        next(stream)
        if end == "crash":
            # The traceback in a record that is kept refers to the engine.
            caplog.set_level(logging.CRITICAL, "photon_grpc.compose.program")
            with monkeypatch.context() as patch:
                patch.setattr(ModelRunner, "submit", None)
                with pytest.raises(EngineFailure):
                    llm.generate("a")
        if end == "drop":
            del stream, llm
            gc.collect()
        else:
            llm.close()
        assert torch.cuda.memory_allocated() - allocated < REST, end
        assert free - free_bytes() < REST, end


def test_one_that_closes_leaves_the_graphs_of_another_alone() -> None:
    flags = {"device": "cuda", "num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    asked = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}
    with LLM(**flags) as stays:
        expected = stays.generate("def fib(n):", **asked)[0].token_ids
        for _ in range(3):
            with LLM(**flags) as goes:
                assert goes.generate("def fib(n):", **asked)[0].token_ids == expected
            # Whatever was given back is taken by somebody else, and written.
            taken = torch.full((256 * MIB,), 255, dtype=torch.uint8, device="cuda")
            assert stays.generate("def fib(n):", **asked)[0].token_ids == expected
            del taken
