"""Float32 on a GPU: 64 greedy tokens behind prompts of 5 to 6,000 tokens are transformers'."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from photon_grpc.config.flags import CacheConfig, SchedulerConfig
from tests.runner.models import greedy
from tests.runner.served import Served

pytestmark = pytest.mark.gpu
LENGTHS = (5, 63, 64, 65, 500, 2049, 6000)


def test_greedy_output_behind_long_prompts_equals_transformers(tmp_path: Path) -> None:
    config = Qwen3Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        vocab_size=320,
        max_position_embeddings=8192,
        initializer_range=0.15,
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(17)
    reference = Qwen3ForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    rng = random.Random(1)
    asked = [[rng.randrange(320) for _ in range(length)] for length in LENGTHS]
    expected = [greedy(reference, prompt, 64) for prompt in asked]
    for budget, depth in ((8192, 1), (512, 0)):
        served = Served(
            tmp_path,
            device="cuda",
            cache=CacheConfig(block_size=64, num_blocks=200),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, async_depth=depth),
        )
        assert served.complete(asked, 64) == expected
