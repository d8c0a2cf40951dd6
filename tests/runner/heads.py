"""EAGLE-3 heads for the embedded model, and drafters as on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.embedded_model.eagle3 import Eagle3, save
from benchmarks.embedded_model.llama import LlamaShape
from photon_grpc.runner.draft_graphs import DraftGraphs
from photon_grpc.runner.model_runner import ModelRunner
from tests.runner.test_graphs import plain_call

IDS = torch.arange(0, 4096, 3)


def random_head(directory: Path) -> Eagle3:
    """Write a head for the embedded model with random weights, over a third of its ids."""
    torch.manual_seed(3)
    head = Eagle3(LlamaShape(256, 192, num_layers=1, num_heads=4, num_kv_heads=2), 4096, len(IDS))
    head.keep(IDS)
    for parameter in head.parameters():
        parameter.data = (0.05 * torch.randn_like(parameter) + (parameter.dim() == 1)).bfloat16().float()
    save(head, directory)
    return head.eval()


def replay_drafts(runner: ModelRunner) -> DraftGraphs:
    """Have the drafter of a runner on a CPU draft in replays, which are called instead of captured; return them."""
    drafter = getattr(runner.drafter, "_drafter", runner.drafter)
    drafter._graphs = graphs = DraftGraphs(plain_call, runner.table)
    return graphs
