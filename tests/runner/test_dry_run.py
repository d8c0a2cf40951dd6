"""A dry run of the start leaves what follows as it was, and computes each kind of layer once."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from photon_grpc.config.flags import SchedulerConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.core.kv import KVPlan
from photon_grpc.kernels import select
from photon_grpc.models import build, load
from photon_grpc.models.short import PassedOver, one_layer_of_each_kind
from photon_grpc.runner.build import graph_runner
from photon_grpc.runner.kv_cache import KVCache
from photon_grpc.runner.model_runner import ModelRunner
from photon_grpc.runner.warm_up import call_once, warm_up, warm_up_drafts
from tests.runner.models import WINDOWED, greedy, model
from tests.runner.served import Served
from tests.runner.test_greedy import prompts


def test_a_dry_run_on_objects_of_its_own_changes_no_output() -> None:
    directory, reference = model("llama")
    device, kernels = torch.device("cpu"), select("torch", "cpu")
    card = read_model_dir(directory)
    decoder = build(card, dtype=torch.float32, device=device, kernels=kernels, max_model_len=256)
    load(decoder, card)
    served = Served(directory, scheduler=SchedulerConfig(max_num_seqs=8))
    seen: list[tuple[int, int]] = []
    short = one_layer_of_each_kind(decoder)
    runner = graph_runner(
        short,
        KVCache(KVPlan(decoder.kv_groups, 16), 1, device),
        max_num_seqs=8,
        depth=1,
        progress=lambda *now: seen.append(now),
        capture=call_once,
    )
    warm_up(runner)
    runner.close()
    assert seen[-1][0] == seen[-1][1] > 10
    asked = prompts(3)
    assert served.complete(asked, 8) == [greedy(reference, prompt, 8) for prompt in asked]


def test_a_step_with_drafts_whose_kernels_compute_nothing_has_no_ids() -> None:
    drafting = Served(model("llama")[0], speculation="ngram", num_drafts=3)
    runner = drafting.assembled.runner
    assert isinstance(runner, ModelRunner)
    step = runner.launch_body._launch._step  # type: ignore[attr-defined]
    step.accept = lambda rows, ids, level: torch.zeros_like(rows.slots)
    warm_up_drafts(runner, drafting.assembled.sizes)


def test_layers_of_one_shape_are_run_once() -> None:
    directory, _ = model("llama")
    card = read_model_dir(directory)
    kernels = select("torch", "cpu")
    decoder = build(card, dtype=torch.float32, device=torch.device("cpu"), kernels=kernels, max_model_len=256)
    load(decoder, card)
    assert len(decoder.layers) > 1
    short = one_layer_of_each_kind(decoder)
    assert short.layers[0] is decoder.layers[0] and len(short.layers) == len(decoder.layers)
    assert all(isinstance(layer, PassedOver) for layer in short.layers[1:])
    assert short.kv_groups == decoder.kv_groups and len(decoder.layers) == len(decoder.kv_groups[0].layers)
    wider = decoder.layers[1].mlp.down
    wider.in_features *= 2
    assert one_layer_of_each_kind(decoder).layers[:2] == decoder.layers[:2]


def test_layers_with_other_windows_are_run_as_well() -> None:
    """Their attention is another kernel, which must not be met within a capture."""
    card = read_model_dir(model(WINDOWED)[0])
    kernels = select("torch", "cpu")
    decoder = build(card, dtype=torch.float32, device=torch.device("cpu"), kernels=kernels, max_model_len=256)
    load(decoder, card)
    short = one_layer_of_each_kind(decoder)
    places = [layer.attention.place for layer in short.layers if not isinstance(layer, PassedOver)]
    assert len(set(places)) == len(places) == len(decoder.places) > 1


def test_loading_imports_no_algebra() -> None:
    """Some operations on meta tensors are Python that imports sympy: half a second of every start."""
    program = (
        "import sys\n"
        "from photon_grpc.compose.assemble import assemble\n"
        "from photon_grpc.config.flags import ServeConfig\n"
        "assemble(ServeConfig(), lambda *now: None)\n"
        "print([name for name in ('sympy', 'transformers', 'torch._dynamo') if name in sys.modules])\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
