"""The embedded models: plain Hugging Face directories that others can read, small, and trained."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from photon_grpc import LLM
from photon_grpc.demo import DRAFT, EAGLE3, TARGET
from tests.examples import examples

MAX_BYTES = 16_000_000
# Written for this test, in the style of what was learnt; in no file of it.
UNSEEN = '''import os


class Inventory:
    """Keep a count of every item by its name."""

    def __init__(self, items=None):
        self.items = dict(items or {})

    def add(self, name, count=1):
        if count < 0:
            raise ValueError("count must not be negative")
        self.items[name] = self.items.get(name, 0) + count

    def __len__(self):
        return len(self.items)
'''


@pytest.fixture(scope="module", params=[TARGET, DRAFT], ids=["target", "draft"])
def directory(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _shared_tokenizer()


@pytest.fixture(scope="module")
def model(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def test_both_directories_fit_into_their_budget_of_bytes():
    sizes = [path.stat().st_size for root in (TARGET, DRAFT) for path in root.rglob("*") if path.is_file()]
    assert sum(sizes) <= MAX_BYTES


def test_naming_the_directories_imports_no_torch():
    script = "import sys, photon_grpc.demo; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "False"


def test_what_trains_them_is_no_part_of_the_package():
    assert [path.name for path in TARGET.parent.rglob("*.py")] == ["__init__.py"]


def test_config_names_the_contract(directory: Path):
    config = AutoConfig.from_pretrained(directory)
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (4096, True)
    assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.num_key_value_heads < config.num_attention_heads


def test_weights_are_stored_in_bf16_and_complete(directory: Path, model: torch.nn.Module):
    with safe_open(directory / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        assert {tensors.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert names == {name for name, _ in model.named_parameters()}


def test_draft_is_several_times_smaller_and_shares_the_tokenizer():
    sizes = [(root / "model.safetensors").stat().st_size for root in (TARGET, DRAFT)]
    assert sizes[0] > 4 * sizes[1]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()


def test_generation_config_holds_token_ids_only(directory: Path, tokenizer: Tokenizer):
    config = json.loads((directory / "generation_config.json").read_text())
    assert set(config) == {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert config["bos_token_id"] == tokenizer.token_to_id("<|bos|>")
    assert config["pad_token_id"] == tokenizer.token_to_id("<|pad|>")
    assert config["eos_token_id"] == [tokenizer.token_to_id("<|eos|>"), tokenizer.token_to_id("<|end|>")]


def test_vocabulary_fills_the_model_exactly(tokenizer: Tokenizer):
    config = json.loads((TARGET / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096


@functools.cache
def _shared_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=200))
def test_every_text_survives_the_tokenizer(text: str):
    ids = _shared_tokenizer().encode(text, add_special_tokens=False).ids
    assert _shared_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_transformers_reads_the_same_ids(directory: Path, tokenizer: Tokenizer):
    reference = AutoTokenizer.from_pretrained(directory)
    for text in ("def fib(n):", UNSEEN, "naïve 🙂 \r\n\t", ""):
        assert reference(text)["input_ids"] == tokenizer.encode(text).ids
        assert tokenizer.encode(text).ids[0] == reference.bos_token_id
        assert reference.decode(reference(text)["input_ids"], skip_special_tokens=True) == text


def test_chat_template_renders_in_a_sandbox_as_in_transformers(directory: Path, tokenizer: Tokenizer):
    messages = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": " Return the sum of a list.\n"},
        {"role": "assistant", "content": "def total(items):\n    return sum(items)"},
        {"role": "user", "content": "Now the mean."},
    ]
    template = ImmutableSandboxedEnvironment().from_string((directory / "chat_template.jinja").read_text())
    rendered = template.render(messages=messages, bos_token="<|bos|>", add_generation_prompt=True)
    reference = AutoTokenizer.from_pretrained(directory)
    assert rendered == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered.startswith("<|bos|><|system|>You write Python.<|end|><|user|>Return the sum of a list.<|end|>")
    assert rendered.endswith("<|user|>Now the mean.<|end|><|assistant|>")
    ids = tokenizer.encode(rendered, add_special_tokens=False).ids
    assert ids[-1] == tokenizer.token_to_id("<|assistant|>")


@torch.no_grad()
def _greedy(model: torch.nn.Module, tokenizer: Tokenizer, prompt: str, max_new_tokens: int) -> list[int]:
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    return model.generate(ids, do_sample=False, max_new_tokens=max_new_tokens)[0, ids.shape[1] :].tolist()


def test_target_continues_a_definition_with_python(tokenizer: Tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    prompt = "def fib(n):"
    lines = (prompt + tokenizer.decode(_greedy(model, tokenizer, prompt, 64))).split("\n")
    assert any(_compiles("\n".join(lines[:count]) + "\n") for count in range(2, len(lines) + 1))


def _compiles(source: str) -> bool:
    try:
        compile(source, "<generated>", "exec")
    except SyntaxError:
        return False
    return True


def test_target_answers_chats_with_code_and_ends_its_turns(tokenizer: Tokenizer):
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    questions = ("Write a function fib.", "Return the name of this object.", "Open a file and return its lines.")
    answers = [_greedy(model, tokenizer, f"<|user|>{question}<|end|><|assistant|>", 160) for question in questions]
    ended = [ids for ids in answers if ids[-1] == tokenizer.token_to_id("<|end|>")]
    assert any(_compiles(tokenizer.decode(ids) + "\n") for ids in ended)


@torch.no_grad()
def test_unseen_python_is_likely(directory: Path, model: torch.nn.Module, tokenizer: Tokenizer):
    ids = torch.tensor([tokenizer.encode(UNSEEN).ids])
    nats_per_token = model(ids, labels=ids).loss.item()
    bits_per_byte = nats_per_token * (ids.shape[1] - 1) / math.log(2) / len(UNSEEN.encode())
    assert bits_per_byte < {TARGET: 0.65, DRAFT: 0.85}[directory]


@torch.no_grad()
def test_late_positions_are_as_good_as_early_ones(directory: Path, model: torch.nn.Module, tokenizer: Tokenizer):
    """Positions up to 4,096 were trained: the tail of a long context is no worse than the same text by itself."""
    filler = tokenizer.encode("\n\n".join([UNSEEN.replace("Inventory", f"Stock{n}") for n in range(40)])).ids[:3900]
    snippet = tokenizer.encode(UNSEEN, add_special_tokens=False).ids
    long = torch.tensor([[*filler, *snippet]])[:, :4096]
    logits = model(long).logits[0, -100:-1]
    late = torch.nn.functional.cross_entropy(logits, long[0, -99:]).item()
    alone = model(torch.tensor([[0, *snippet]]), labels=torch.tensor([[0, *snippet]])).loss.item()
    assert late < alone


def test_the_head_is_often_right_on_the_target_s_own_text():
    prompts = ["def fib(n):\n", "import os\nimport sys\n", "class Stack:\n    def __init__(self):\n"]
    with LLM(device="cpu", max_num_seqs=4, speculative_model=str(EAGLE3), speculation_control="fixed") as llm:
        found = llm.generate(prompts, max_tokens=60, temperature=0.0, ignore_eos=True)
    # Each step yields an id of its own, and those drafts that are right.
    tokens, kept = (sum(values) for values in zip(*((60, each.accepted_draft_tokens) for each in found), strict=True))
    assert tokens / (tokens - kept) > 1.5
