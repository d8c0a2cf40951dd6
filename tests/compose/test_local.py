"""`LLM`: the whole program in one process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from photon_grpc import LLM
from photon_grpc.client import SyncClient
from photon_grpc.config.resolve import resolve
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import ConfigError, InvalidRequest, PromptTooLong
from photon_grpc.service.processes import check_start
from tests.notebook import run_cells
from tests.service.tiny import write_tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("local") / "tiny")
    with LLM(
        model,
        load_format="dummy",
        device="cpu",
        num_blocks=256,
        max_queue_size=8,
        max_queued_tokens=200,
        max_num_seqs=4,
    ) as llm:
        yield llm


def test_one_text_gives_one_completion(llm):
    (completion,) = llm.generate("def fib", max_tokens=6, temperature=0)
    assert len(completion.token_ids) == 6
    assert completion.finish_reason == FinishReason.MAX_TOKENS
    assert completion.prompt_tokens == len("def fib")
    assert isinstance(completion.text, str)


def test_the_engine_and_doctor_name_one_version_of_the_numerics(llm, target, tmp_path):
    numerics = llm._program._frontend.model("").numerics
    with SyncClient(target) as client:
        assert client.generate([1, 2], max_tokens=2).numerics_version == numerics.version
    assert len(numerics.version) == 16
    assert (numerics.mode, numerics.kernels, numerics.dtype) == ("strict", "torch", "float32")
    settings = {"model": str(write_tiny_model(tmp_path / "tiny")), "load_format": "dummy", "device": "cpu"}
    versions = [
        check_start.numerics_version(resolve(settings | more, {}).config)
        for more in ({}, {"dtype": "bfloat16"}, {"numerics": "fast"}, {"block_size": 32, "max_num_seqs": 3})
    ]
    strict, other_type, fast, other_sizes = versions
    assert strict == other_sizes == numerics.version
    assert len({strict, other_type, fast}) == 3 and fast.startswith("fast-")


def test_more_prompts_than_may_wait_all_come_back_in_order(llm):
    prompts = [[1 + n % 50, 2, 3] for n in range(60)]
    completions = llm.generate(prompts, max_tokens=3, temperature=0)
    assert [completion.prompt_index for completion in completions] == list(range(60))
    assert all(len(completion.token_ids) == 3 for completion in completions)
    assert completions[0].token_ids == llm.generate([prompts[0]], max_tokens=3, temperature=0)[0].token_ids


def test_prompts_longer_together_than_the_queue_wait_their_turn(llm):
    prompts = [[1 + n] * 150 for n in range(20)]
    assert all(len(completion.token_ids) == 2 for completion in llm.generate(prompts, max_tokens=2))
    assert all(len(completion.token_ids) == 2 for completion in llm.generate([[1] * 300, [2] * 300], max_tokens=2))


def test_several_outputs_of_one_prompt(llm):
    completions = llm.generate(["abc", "d"], num_outputs=2, max_tokens=8, seed=7)
    assert [(c.prompt_index, c.output_index) for c in completions] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert completions[0].token_ids != completions[1].token_ids
    assert completions == completions
    again = llm.generate(["abc", "d"], num_outputs=2, max_tokens=8, seed=7)
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]


def test_a_stream_adds_up_to_the_completion(llm):
    (completion,) = llm.generate("import", max_tokens=20, temperature=0)
    deltas = list(llm.stream("import", max_tokens=20, temperature=0))
    assert "".join(delta.text for delta in deltas) == completion.text
    assert sum((delta.token_ids for delta in deltas), ()) == completion.token_ids
    assert deltas[-1].finish.reason == FinishReason.MAX_TOKENS


def test_leaving_a_stream_early_leaves_the_rest_uncomputed(llm):
    for _ in llm.stream("import", max_tokens=2000, temperature=0):
        break
    assert len(llm.generate("a", max_tokens=2)[0].token_ids) == 2


def test_what_is_refused_is_raised_and_the_next_call_works(llm):
    with pytest.raises(InvalidRequest):
        llm.generate("")
    with pytest.raises(PromptTooLong):
        llm.generate(["fine", [1] * 5000], max_tokens=4)
    with pytest.raises(InvalidRequest, match="a list in a list"):
        llm.generate([1, 2, 3])
    with pytest.raises(TypeError, match="max_token"):
        llm.generate("a", max_token=3)
    assert llm.generate("a", max_tokens=1)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_option_that_does_not_exist_is_named_with_those_that_do(llm, call):
    with pytest.raises(TypeError, match=r"no option 'foo'; there are .*temperature"):
        getattr(llm, call)("a", foo=1)


def test_a_flag_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_seq=3)


@pytest.mark.parametrize(
    ("keywords", "told", "field"),
    [
        ({"model": "/no/such"}, "model: no directory /no/such", "model"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be a whole number, at least 1", "max_num_seqs"),
        ({"step_trace": "/no/such"}, "step_trace /no/such: No such file", "step_trace"),
        ({"max_model_len": 100_000}, "max_model_len 100000 exceeds the limit of", "max_model_len"),
    ],
)
def test_a_wrong_value_is_told_by_its_keyword(keywords, told, field):
    with pytest.raises(ConfigError, match=f"^{told}") as caught:
        LLM(**{"device": "cpu", **keywords})
    assert (caught.value.message, caught.value.field) == (str(caught.value), field)


def test_many_threads_at_a_time(llm):
    prompts = [f"def f{n % 5}" for n in range(32)]
    alone = {prompt: llm.generate(prompt, max_tokens=6, temperature=0)[0].token_ids for prompt in prompts[:5]}

    def ask(number):
        if number % 2:
            deltas = llm.stream(prompts[number], max_tokens=6, temperature=0)
            return tuple(token for delta in deltas for token in delta.token_ids)
        return llm.generate(prompts[number], max_tokens=6, temperature=0)[0].token_ids

    # No more than run and may wait: a stream is refused where no place is left.
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(32))) == [alone[prompt] for prompt in prompts]


async def test_cells_of_a_notebook(tmp_path):
    asked = "'def fib', max_tokens=6, temperature=0"
    left = await run_cells(
        "import asyncio; from photon_grpc import LLM",
        "llm = LLM(model, load_format='dummy', device='cpu', num_blocks=64, max_num_seqs=4)",
        f"whole = llm.generate({asked})[0].token_ids",
        f"streamed = tuple(token for delta in llm.stream({asked}) for token in delta.token_ids)",
        "for delta in llm.stream('def fib', max_tokens=200, ignore_eos=True): break",
        f"both = await asyncio.gather(*[asyncio.to_thread(llm.generate, {asked}) for _ in range(8)])",
        "llm.close()",
        model=str(write_tiny_model(tmp_path / "tiny")),
    )
    assert len(left["whole"]) == 6
    assert {left["streamed"], *(one.token_ids for (one,) in left["both"])} == {left["whole"]}


def test_closing_twice_is_closing_once_and_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    llm = LLM(write_tiny_model(tmp_path / "tiny"), load_format="dummy", device="cpu", num_blocks=16)
    assert llm.generate("a", max_tokens=1)
    llm.close()
    llm.close()
    assert not set(threading.enumerate()) - before


def test_streams_wait_for_a_place_in_the_queue_as_generate_does(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    flags = {"load_format": "dummy", "device": "cpu", "num_blocks": 64, "max_num_seqs": 1, "max_queue_size": 1}
    with LLM(model, **flags) as llm, ThreadPoolExecutor(6) as threads:

        def num_tokens(prompt: str) -> int:
            return sum(len(delta.token_ids) for delta in llm.stream(prompt, max_tokens=30, ignore_eos=True))

        assert list(threads.map(num_tokens, "abcdef")) == [30] * 6


def test_streams_come_again_where_preempted_ones_have_filled_the_queue(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    flags = {"load_format": "dummy", "device": "cpu", "num_blocks": 14, "block_size": 4, "max_num_seqs": 8}
    with LLM(model, max_queue_size=1, **flags) as llm, ThreadPoolExecutor(24) as threads:

        def num_tokens(number: int) -> int:
            return sum(
                len(delta.token_ids) for delta in llm.stream(f"abcdefgh{number}", max_tokens=30, ignore_eos=True)
            )

        assert list(threads.map(num_tokens, range(60))) == [30] * 60
