"""What leaves training: Hugging Face directories, the figures measured on them, and the model card."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from .llama import Llama
from .tokenizer import BOS_ID, END_ID, EOS_ID, PAD_ID, VOCAB_SIZE, save_tokenizer

PROMPTS = ("def fib(n):", "import os", "class Stack:")
CHAT_PROMPT = "Return the largest item of a list."
CHAT_FORM = "<|user|>{}<|end|><|assistant|>"


def round_to_bf16(model: Llama) -> None:
    """The weights become what the file will hold, so that everything measured after this is what is served."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)


def save_model(model: Llama, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes one plain Hugging Face directory, weights in bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.bfloat16).cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    _write_json(directory / "config.json", model.shape.hf_config())
    token_ids = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID], "pad_token_id": PAD_ID}
    _write_json(directory / "generation_config.json", token_ids)
    save_tokenizer(tokenizer, directory, model.shape.max_positions)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def check_against_transformers(model: Llama, directory: Path) -> str:
    """Compares logits in float32 with transformers' LlamaForCausalLM on the saved directory; ValueError beyond 1e-4."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return "not compared with transformers, which is not installed"
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.randint(0, VOCAB_SIZE, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (reference(ids).logits - model.cpu().eval()(ids)).abs().max().item()
    if difference > 1e-4:
        raise ValueError(f"logits differ from transformers' by {difference:.2e}, more than 1e-4")
    return f"largest difference of logits from transformers' LlamaForCausalLM: {difference:.1e} (float32)"


@torch.no_grad()
def agreement(target: Llama, draft: Llama, batches: Tensor) -> tuple[float, float]:
    """(share of positions where both argmaxes are equal, mean sum of min(p, q)): the acceptance that speculation of
    one token would see under greedy decoding and under sampling at temperature 1."""
    target.eval()
    draft.eval()
    equal = overlap = 0.0
    for ids in batches[:, :-1].split(8):
        target_logits, draft_logits = target(ids), draft(ids)
        equal += (target_logits.argmax(-1) == draft_logits.argmax(-1)).float().mean(1).sum().item()
        shared = torch.minimum(F.softmax(target_logits, -1), F.softmax(draft_logits, -1))
        overlap += shared.sum(-1).mean(1).sum().item()
    return equal / len(batches), overlap / len(batches)


@torch.no_grad()
def continue_greedily(model: Llama, ids: list[int], max_tokens: int = 96) -> list[int]:
    """Greedy ids after `ids`, without a KV cache, up to an end token."""
    model.eval()
    device = next(model.parameters()).device
    output: list[int] = []
    while len(output) < max_tokens:
        next_id = int(model(torch.tensor([ids + output], device=device))[0, -1].argmax())
        if next_id in (EOS_ID, END_ID):
            break
        output.append(next_id)
    return output


def samples(model: Llama, tokenizer: Tokenizer) -> str:
    """Greedy continuations as Markdown."""
    parts = []
    for prompt in PROMPTS:
        output = continue_greedily(model, tokenizer.encode(prompt).ids)
        parts.append(f"```python\n{prompt}{tokenizer.decode(output)}\n```")
    chat = continue_greedily(model, tokenizer.encode(CHAT_FORM.format(CHAT_PROMPT)).ids)
    parts.append(f"Asked in chat, “{CHAT_PROMPT}”:\n\n```python\n{tokenizer.decode(chat)}\n```")
    return "\n\n".join(parts)


def machine_name(device: torch.device) -> str:
    return f"one {torch.cuda.get_device_name(device)}" if device.type == "cuda" else f"a CPU ({platform.machine()})"
