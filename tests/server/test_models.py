"""ModelService: pages, facts, tokenizer."""

from __future__ import annotations

import dataclasses

import grpc
import pytest

from photon_grpc.client.model import read_model
from photon_grpc.config.experts import ExpertSpec
from photon_grpc.config.quantization import WeightBytes
from photon_grpc.core.ask import ChatInput, ChatMessage, SamplingAsk, TextInput
from photon_grpc.core.stats import Load
from photon_grpc.frontend.readiness import State
from photon_grpc.server.models import _model_message
from photon_grpc.v1 import inference_pb2 as ipb
from photon_grpc.v1 import model_pb2 as pb
from photon_grpc.v1 import model_pb2_grpc
from tests.server.failing import failure, info_of
from tests.server.fake_frontend import FakeFrontend, facts

Stub = model_pb2_grpc.ModelServiceStub
Code = grpc.StatusCode


async def refused_field(call: object) -> tuple[grpc.StatusCode, str]:
    error = await failure(call)
    return error.code(), info_of(error).metadata["field"]


async def test_pages_hold_every_model_once_and_end(models: Stub, frontend: FakeFrontend) -> None:
    names, token = [], ""
    for _ in range(2):
        page = await models.ListModels(pb.ListModelsRequest(page_size=2, page_token=token))
        names += [model.name for model in page.models]
        token = page.next_page_token
    assert names == ["demo", "other", "third"]
    assert token == ""


@pytest.mark.parametrize("size", [0, 3, 1000, 2**31 - 1])
async def test_a_page_may_hold_all(models: Stub, size: int) -> None:
    page = await models.ListModels(pb.ListModelsRequest(page_size=size))
    assert (len(page.models), page.next_page_token) == (3, "")


async def test_invalid_page_tokens_and_sizes_are_named(models: Stub) -> None:
    call = models.ListModels(pb.ListModelsRequest(page_size=-1))
    assert await refused_field(call) == (Code.INVALID_ARGUMENT, "page_size")
    call = models.ListModels(pb.ListModelsRequest(page_token="nonsense"))
    assert await refused_field(call) == (Code.INVALID_ARGUMENT, "page_token")


@pytest.mark.parametrize("name", ["", "demo", "default"])
async def test_a_model_reports_all_its_facts(models: Stub, name: str) -> None:
    model = (await models.GetModel(pb.GetModelRequest(model=name))).model
    assert (model.name, list(model.aliases)) == ("demo", ["default"])
    assert (model.max_context_tokens, model.vocab_size, list(model.eos_token_ids)) == (4096, 100, [2, 3])
    expected = ipb.SamplingParams(temperature=0.5, top_k=40)
    assert model.default_sampling == expected
    by_model = [pb.FEATURE_TEXT, pb.FEATURE_CHAT, pb.FEATURE_NUM_OUTPUTS]
    assert list(model.features) == [*by_model, pb.FEATURE_MULTIPLEX, pb.FEATURE_UNKNOWN_FIELDS_REFUSED]
    assert (model.revision, model.dtype, model.quantization) == ("abc", "float32", "")
    assert not model.HasField("weight_bytes")
    limits = model.limits
    assert (limits.max_num_outputs, limits.max_logprobs) == (8, 20)
    assert (limits.max_stop_strings, limits.max_stop_string_bytes, limits.max_logit_bias) == (64, 1024, 1024)
    assert (limits.max_constraint_bytes, limits.max_message_bytes) == (1 << 20, 1 << 25)


def test_a_quantized_model_reports_what_it_saves() -> None:
    known = dataclasses.replace(facts("demo"), weight_bytes=WeightBytes(7 << 32, 8 << 32, 9))
    model = read_model(_model_message(known, State.SERVING, Load()))
    assert model.weight_bytes == {"held": 7 << 32, "saved": 8 << 32, "kv_tokens_gained": 9}


def test_a_model_with_experts_reports_them_and_how_steps_reach_them() -> None:
    spec = ExpertSpec(64, 6, 1408, "softmax", renormalises=False, layers=(False, True, True), shared_size=2816)
    known = dataclasses.replace(facts("demo"), experts=spec)
    model = read_model(_model_message(known, State.SERVING, Load()))
    fixed = {"count": 64, "per_token": 6, "shared": 2, "sparse_layers": 2}
    assert model.experts == fixed | {"reached_per_step": 0.0, "imbalance": 0.0}
    load = Load(expert_layers=10, experts_reached=225, busiest_expert_tokens=30, expert_tokens=480)
    model = read_model(_model_message(known, State.SERVING, load))
    # A layer's busiest expert has 3 tokens of 48, 64 share them.
    assert model.experts == fixed | {"reached_per_step": 22.5, "imbalance": 4.0}
    # The same on each of two ranks, of which one is counted, with 32 of the experts.
    known = dataclasses.replace(known, expert_shares=2)
    model = read_model(_model_message(known, State.SERVING, load))
    assert model.experts == fixed | {"reached_per_step": 45.0, "imbalance": 2.0}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State.LOADING, pb.MODEL_STATE_LOADING),
        (State.SERVING, pb.MODEL_STATE_READY),
        (State.RESTARTING, pb.MODEL_STATE_LOADING),
        (State.DRAINING, pb.MODEL_STATE_DRAINING),
        (State.FAILED, pb.MODEL_STATE_FAILED),
    ],
)
async def test_a_models_state_is_that_of_the_front_end(
    models: Stub, frontend: FakeFrontend, state: State, expected: int
) -> None:
    frontend.become(state)
    assert (await models.GetModel(pb.GetModelRequest())).model.state == expected


async def test_an_unknown_model_is_not_found(models: Stub) -> None:
    for call in (
        models.GetModel(pb.GetModelRequest(model="x")),
        models.Tokenize(pb.TokenizeRequest(model="x", text="a")),
        models.Detokenize(pb.DetokenizeRequest(model="x", token_ids=ipb.TokenIds(ids=[1]))),
    ):
        error = await failure(call)
        assert (error.code(), info_of(error).reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_tokenize(models: Stub, frontend: FakeFrontend) -> None:
    response = await models.Tokenize(pb.TokenizeRequest(text="hi"))
    assert (response.token_count, list(response.token_ids), response.max_context_tokens) == (3, [1, 2, 3], 4096)
    response = await models.Tokenize(pb.TokenizeRequest(text="hi", count_only=True))
    assert (response.token_count, list(response.token_ids)) == (3, [])
    await models.Tokenize(pb.TokenizeRequest(text="hi", add_special_tokens=False, parse_special_tokens=True))
    chat = ipb.ChatInput(messages=[ipb.ChatMessage(role="user", content="q")])
    await models.Tokenize(pb.TokenizeRequest(model="other", chat=chat))
    assert frontend.tokenized == [
        ("", TextInput("hi")),
        ("", TextInput("hi")),
        ("", TextInput("hi", parse_special_tokens=True, add_special_tokens=False)),
        ("other", ChatInput((ChatMessage("user", "q"),))),
    ]


async def test_tokenizing_an_empty_text_is_refused(models: Stub) -> None:
    assert await refused_field(models.Tokenize(pb.TokenizeRequest())) == (Code.INVALID_ARGUMENT, "input")


async def test_detokenize(models: Stub) -> None:
    ids = ipb.TokenIds(ids=[0, 99])
    assert (await models.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == ":[0, 99]:True"
    request = pb.DetokenizeRequest(model="demo", token_ids=ids, skip_special_tokens=False)
    assert (await models.Detokenize(request)).text == "demo:[0, 99]:False"


@pytest.mark.parametrize("ids", [None, [], [1] * 4097])
async def test_empty_and_too_long_id_lists_are_refused(models: Stub, ids: list[int] | None) -> None:
    request = pb.DetokenizeRequest(token_ids=None if ids is None else ipb.TokenIds(ids=ids))
    assert await refused_field(models.Detokenize(request)) == (Code.INVALID_ARGUMENT, "token_ids.ids")


async def test_too_many_messages_are_refused(models: Stub) -> None:
    request = pb.TokenizeRequest(chat=ipb.ChatInput(messages=[ipb.ChatMessage()] * 4097))
    assert await refused_field(models.Tokenize(request)) == (Code.INVALID_ARGUMENT, "chat.messages")


async def test_the_request_id_comes_back(models: Stub) -> None:
    call = models.GetModel(pb.GetModelRequest(), metadata=(("x-request-id", "r7"),))
    assert dict(await call.initial_metadata())["x-request-id"] == "r7"


async def test_unset_defaults_stay_unset(models: Stub, frontend: FakeFrontend) -> None:
    assert frontend.served[0].default_sampling == SamplingAsk(temperature=0.5, top_k=40)
    sampling = (await models.GetModel(pb.GetModelRequest())).model.default_sampling
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("seed")
