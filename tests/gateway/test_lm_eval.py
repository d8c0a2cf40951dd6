"""lm-evaluation-harness finds through HTTP and gRPC what transformers computes from the same files.

lm_eval lives in an environment of its own, named by PHOTON_LM_EVAL_PYTHON:
`pip install 'lm_eval[api]' transformers photon-grpc`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.service import free_address, serving
from photon_grpc import demo

ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).parent / "lm_eval"
ITEMS = [json.loads(line) for line in (TASKS / "items.jsonl").read_text().splitlines()]
PYTHON = os.environ.get("PHOTON_LM_EVAL_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="PHOTON_LM_EVAL_PYTHON does not name a python with lm_eval"),
]

_COMPLETIONS = (
    f"base_url=http://{{http}}/v1/completions,model=photon-demo,tokenizer={demo.TARGET},"
    "add_bos_token=True,max_length=4096,max_retries=1,"
)
#: Model of lm_eval -> its arguments.
APIS = {
    "http, ids": ("local-completions", _COMPLETIONS + "tokenized_requests=True,num_concurrent=8,batch_size=4"),
    "http, text": ("local-completions", _COMPLETIONS + "tokenized_requests=False,num_concurrent=4"),
    "grpc": ("photon", "target={grpc}"),
}
CHATS = {
    "http": ("local-chat-completions", "base_url=http://{http}/v1/chat/completions,model=photon-demo,max_retries=1"),
    "grpc": ("photon", "target={grpc}"),
}


class Addresses(NamedTuple):
    grpc: str
    http: str


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    http = free_address()
    with serving("--device", "cpu", "--http-listen", http) as grpc:
        yield Addresses(grpc, http)


def evaluated(api: tuple[str, str], addresses: Addresses, *tasks: str) -> dict[str, list[Any]]:
    """Return the results of each task, in the order of its items."""
    model, arguments = api
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'clients' / 'python'}",
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
    }
    done = subprocess.run(
        [PYTHON, "evaluate.py", model, arguments.format(**addresses._asdict()), *tasks],
        cwd=TASKS,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[Any]] = {}
    for line in done.stdout.splitlines():
        result = json.loads(line)
        found.setdefault(result["task"], []).append(result["result"])
    return found


@cache
def reference() -> tuple[Any, Any]:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype="float32")
    return transformers.AutoTokenizer.from_pretrained(demo.TARGET), model


def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Return the log-probability of the continuation, and whether each of its tokens is the likeliest."""
    import torch

    _, model = reference()
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        rows = torch.log_softmax(model(ids).logits[0, len(context) - 1 : -1].double(), dim=-1)
    chosen = torch.tensor(continuation, dtype=torch.long)
    is_greedy = bool((rows.argmax(dim=-1) == chosen).all())
    return float(rows.gather(1, chosen[:, None]).sum()), is_greedy


def scores_of_choices(item: dict[str, Any]) -> list[tuple[float, bool]]:
    tokenizer, _ = reference()
    # Space before a choice belongs to the choice, as in lm_eval.
    context = item["prompt"].rstrip()
    start = tokenizer.encode(context)
    wholes = [tokenizer.encode(item["prompt"] + choice) for choice in item["choices"]]
    return [score(start, whole[len(start) :]) for whole in wholes]


def score_of_text(item: dict[str, Any]) -> float:
    tokenizer, _ = reference()
    return score([tokenizer.bos_token_id], tokenizer.encode(item["text"]))[0]


def continuation(item: dict[str, Any]) -> str:
    tokenizer, model = reference()
    prompt = tokenizer(item["prompt"], return_tensors="pt")
    (ids,) = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(ids[prompt.input_ids.shape[1] :], skip_special_tokens=True)
    return str(text.partition("\n\n")[0])


@pytest.mark.parametrize("api", APIS)
def test_results_are_those_of_transformers(api: str, addresses: Addresses) -> None:
    found = evaluated(APIS[api], addresses, "photon_choices", "photon_rolling", "photon_generate")
    for item, choices in zip(ITEMS, found["photon_choices"], strict=True):
        for [[logprob, is_greedy]], expected in zip(choices, scores_of_choices(item), strict=True):
            assert logprob == pytest.approx(expected[0], abs=1e-3)
            assert is_greedy == expected[1]
    for item, [logprob] in zip(ITEMS, found["photon_rolling"], strict=True):
        assert (logprob[0] if isinstance(logprob, list) else logprob) == pytest.approx(score_of_text(item), abs=1e-3)
    assert [text for [[text]] in found["photon_generate"]] == [continuation(item) for item in ITEMS]


def test_chats_have_the_same_answers_through_both_apis(addresses: Addresses) -> None:
    http, grpc = (evaluated(CHATS[api], addresses, "chat", "photon_generate") for api in ("http", "grpc"))
    assert http == grpc
    assert any(text for [[text]] in http["photon_generate"])
