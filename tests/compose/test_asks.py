"""What `LLM` takes: every value of a wrong type is refused by name, and none of them reaches the engine."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc import LLM
from photon_grpc.client import Options
from photon_grpc.compose.llm import _listed
from photon_grpc.config.settings import settings
from photon_grpc.core.ask import Ask, ChatMessage, ToolChoice
from photon_grpc.core.frames import Add
from photon_grpc.errors import ConfigError, InvalidRequest, PhotonError
from tests.service.tiny import write_tiny_model

INTEGERS = (
    "max_tokens",
    "min_tokens",
    "top_k",
    "seed",
    "num_outputs",
    "priority",
    "speculation",
    "logprobs",
    "prompt_logprobs",
)
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NUMBERS = ("temperature", "top_p", "min_p", "max_duration")
SWITCHES = (
    *("chat", "ignore_eos", "include_stop_in_text", "skip_special_tokens", "bypass_prefix_cache", "json_object"),
    *("parse_special_tokens", "add_generation_prompt"),
)

BIASES: tuple[dict[int, float], ...] = (
    *({-1: 1.0}, {2**64: 1.0}, {1: 101.0}, {1: math.nan}),
    dict.fromkeys(range(1025), 1.0),
)

#: Of no type that any option takes.
NEVER = (
    b"1",
    bytearray(b"1"),
    memoryview(b"1"),
    {},
    {"a": 1},
    object(),
    1j,
    len,
    int,
    Ellipsis,
    np.array(b"1"),
)
#: Option -> what is wrong for it besides.
WRONG: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(
        INTEGERS, (2.5, 2.0, Decimal(2), True, "3", "", [3], (3,), math.nan, np.float64(2), np.True_, np.array([1]))
    ),
    **dict.fromkeys((*NUMBERS, *PENALTIES), (True, "0.5", [0.5], np.False_, np.array([0.5]), 10**400)),
    **dict.fromkeys(SWITCHES, (0, 1, "no", "", 1.0, [], [True], np.int64(1))),
    "stop_strings": (1, 2.5, True, [1], [None], ["a", b"b"], [["a"]], [{}], np.array([1])),
    **dict.fromkeys(
        ("stop_token_ids", "continue_from", "allowed_token_ids", "score_token_ids"),
        (1, "12", "", [1.5], [True], [None], ["1"], [[1]], [b"1"], np.array([1.5]), np.array([True])),
    ),
    "logit_bias": (1, "1", [1], {"a": 1.0}, {1: "1"}, {1: None}, {1.5: 1.0}),
    **dict.fromkeys(("regex", "grammar", "json_schema"), (1, 2.5, True, ["a"], [1], [{}])),
    "message_type": (1, "a", True, ["a"], {}, int, LLM),
    "choices": ("a", 1, 2.5, True, [1], [None], ["a", b"b"], [["a"]], [{}], np.array([1])),
    **dict.fromkeys(
        ("session_id", "salt", "template_args_json", "tools_json", "tool_choice"), (1, 2.5, True, ["a"], [1], [{}])
    ),
    "tools": (1, 2.5, True, "[]", ["a"], [1]),
}
#: Of the right type, and no request.
IMPOSSIBLE: list[tuple[str, object]] = [
    *[(name, value) for name in NUMBERS for value in (math.nan, math.inf, -math.inf, 1e400, -1, -1.0)],
    *[(name, value) for name in INTEGERS for value in (2**64, -(2**64), 10**400)],
    *[(name, -1) for name in INTEGERS if name not in ("top_k", "priority")],
    ("top_k", -2),
    ("stop_token_ids", [2**64]),
    ("stop_token_ids", [-1]),
    ("continue_from", [2**64]),
    ("continue_from", [-1]),
    ("session_id", "s" * 257),
    ("salt", "s" * 257),
    *[(name, value) for name in PENALTIES for value in (math.nan, math.inf, -math.inf, 3e4, -3.0)],
    ("repetition_penalty", 0.0),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [2**64]),
    *[("logit_bias", wrong) for wrong in BIASES],
    ("stop_strings", [""]),
    ("stop_strings", "\ud800"),
]
WRONG_PROMPTS = [None, 5, 2.5, True, *NEVER, [1.5], [True], [None], ["a", 1], [[1]], np.array([1.5]), {"role": "user"}]
WRONG_CHATS = [
    [{"content": "a"}],
    [{}],
    [{"role": "user", "content": None}],
    [{"role": None, "content": "a"}],
    [{"role": "user", "content": "a", "text": "b"}],
    [{"role": "user", "content": ["a"]}],
    [{"role": "user", "content": b"a"}],
    [{1: 2}],
    ["a"],
    [1],
    [None],
    [ChatMessage("user", "a")],
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_tiny_model(tmp_path_factory.mktemp("asks") / "tiny")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with LLM(model, load_format="dummy", device="cpu", num_blocks=64) as llm:
        yield llm


@pytest.fixture
def sent(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Add]:
    """Return the requests that the engine received."""
    frames: list[Add] = []
    client = llm._program._client
    send = client.send

    def note(frame: Any) -> None:
        frames.append(frame)
        send(frame)

    monkeypatch.setattr(client, "send", note)
    return frames


def asks_for(llm: LLM, prompts: Any, options: dict[str, Any]) -> list[Ask]:
    """Return the asks that the engine would receive; `chat` is one of the options here."""
    others = {name: value for name, value in options.items() if name != "chat"}
    return llm._asks(_listed(prompts), options.get("chat", False), others)


def ask_for(llm: LLM, prompt: Any, options: dict[str, Any]) -> Ask:
    (ask,) = asks_for(llm, [prompt], options)
    return ask


def test_every_option_is_in_the_table(llm: LLM) -> None:
    with pytest.raises(TypeError) as caught:
        ask_for(llm, "a", {"": 1})
    known = str(caught.value).rpartition("there are ")[2].split(", ")
    assert sorted(WRONG.keys() - {"chat"}) == known


def test_a_name_of_another_api_is_told_as_ours(llm: LLM) -> None:
    with pytest.raises(TypeError, match="stop= is called stop_strings= here; there are add_generation_prompt, "):
        ask_for(llm, "a", {"stop": "b"})
    with pytest.raises(TypeError, match=r"the model is that of LLM\(model\)"):
        asks_for(llm, ["a"], {"model": "b"})


def wrong_for(name: str) -> list[object]:
    """No bias is none, and a schema is a dict."""
    is_right = {"logit_bias": lambda value: value == {}, "json_schema": lambda value: isinstance(value, dict)}.get(name)
    return [*WRONG[name], *(each for each in NEVER if is_right is None or not is_right(each))]


@pytest.mark.parametrize("name", WRONG)
def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_option(llm: LLM, name: str) -> None:
    for value in wrong_for(name):
        for ask, prompt in ((ask_for, "a"), (asks_for, ["a"])):
            with pytest.raises(InvalidRequest, match=rf"^([a-z_]+\.)?{name}[^\n]*$") as caught:
                ask(llm, prompt, {name: value})
            assert name in caught.value.field.split(".")


def refusals(llm: LLM, prompt: object, options: dict[str, object]) -> list[PhotonError]:
    """Return the errors of `generate` and `stream`."""
    with pytest.raises(PhotonError) as generated:
        llm.generate([prompt], **options)  # type: ignore[list-item, arg-type]
    with pytest.raises(PhotonError) as streamed:
        next(llm.stream(prompt, **options))  # type: ignore[arg-type]
    return [generated.value, streamed.value]


def test_nothing_of_a_wrong_type_or_value_reaches_the_engine(llm: LLM, sent: list[Add]) -> None:
    wrong = [(name, value) for name in WRONG for value in wrong_for(name)]
    for name, value in wrong + IMPOSSIBLE:
        for error in refusals(llm, "a", {name: value}):
            assert name.removesuffix("_s") in error.field, (name, value, error)
    for prompt, chat in [(prompt, False) for prompt in WRONG_PROMPTS] + [(chat, True) for chat in WRONG_CHATS]:
        for error in refusals(llm, prompt, {"chat": chat}):
            assert isinstance(error, InvalidRequest) and error.field.startswith("prompt"), (prompt, error)
    for prompts in (None, 5, 2.5, *NEVER, [1, 2], [2.5], iter("ab")):
        with pytest.raises(InvalidRequest, match=r"^prompts|a list in a list"):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a list in a list"):
        llm.generate([{"role": "user", "content": "a"}], chat=True)  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="show_progress"):
        llm.generate("a", show_progress="yes")  # type: ignore[arg-type]
    assert sent == []


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=2)
        | st.tuples(inner)
        | st.sets(st.integers())
    ),
    max_leaves=6,
)


@given(name=st.sampled_from(sorted(WRONG)), value=anything, prompt=anything)
def test_whatever_is_given_is_an_ask_or_one_kind_of_error(llm: LLM, name: str, value: object, prompt: object) -> None:
    for ask, asked in ((ask_for, prompt), (asks_for, prompt), (ask_for, "a")):
        try:
            ask(llm, asked, {name: value})
        except InvalidRequest as error:
            assert error.field


def test_numbers_and_lists_of_numpy_and_torch_are_numbers_and_lists(llm: LLM) -> None:
    numpy = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "top_p": np.int8(1), "ignore_eos": np.True_}
    asked = ask_for(
        llm, np.array([1, 2]), {**numpy, "stop_token_ids": torch.tensor([3]), "stop_strings": np.array(["a"])}
    )
    assert asked.input.token_ids == (1, 2)  # type: ignore[union-attr]
    assert (asked.stop.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (3, 0.5, 1.0)
    assert (asked.stop.ignore_eos, asked.stop.stop_token_ids, asked.stop.stop_strings) == (True, (3,), ("a",))
    assert {type(asked.stop.max_tokens), type(asked.stop.stop_token_ids[0])} == {int}
    for prompts in (np.array([[1, 2]]), [np.array([1, 2])], [[np.int64(1), 2]], ([1, 2],), [range(1, 3)]):
        assert [ask.input.token_ids for ask in asks_for(llm, prompts, {})] == [(1, 2)]  # type: ignore[union-attr]


def test_every_option_has_the_name_that_the_client_gives_it() -> None:
    assert WRONG.keys() - {"chat"} <= Options.__annotations__.keys()


def test_none_is_unset_for_every_option(llm: LLM) -> None:
    unset, default = ask_for(llm, "a", dict.fromkeys(WRONG)), ask_for(llm, "a", {})
    assert (unset.sampling, unset.stop, unset.output) == (default.sampling, default.stop, default.output)


def test_a_conversation_takes_any_mapping(llm: LLM) -> None:
    turn = {"role": "user", "content": "a"}
    asked = ask_for(llm, [turn, types.MappingProxyType(turn)], {"chat": True})
    assert asked.input.messages == (ChatMessage("user", "a"),) * 2  # type: ignore[union-attr]
    tools = ask_for(llm, "a", {"chat": True, "tools_json": "[]", "template_args_json": "{}"}).input
    assert (tools.tools_json, tools.template_args_json) == ("[]", "{}")  # type: ignore[union-attr]
    choices = {"required": ToolChoice(), "auto": None, "": ToolChoice(""), "weather": ToolChoice("weather")}
    for choice, wanted in choices.items():
        assert ask_for(llm, "a", {"chat": True, "tool_choice": choice}).input.tool_choice == wanted  # type: ignore[union-attr]
    for name in ("tools", "tools_json", "template_args_json", "tool_choice"):
        with pytest.raises(InvalidRequest, match="needs a chat") as refused:
            ask_for(llm, "a", {name: "[]"})
        assert refused.value.field == f"chat.{name}"
    assert asks_for(llm, ["a"], {"chat": True})[0].input.messages == (ChatMessage("user", "a"),)  # type: ignore[union-attr]


SERVER_ONLY = [setting for setting in settings() if setting.section == "server"]


@pytest.mark.parametrize("setting", SERVER_ONLY, ids=lambda setting: setting.name)
def test_a_setting_of_the_server_is_refused_by_name(setting: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting.name} is a setting of `photon-grpc serve`"):
        LLM(**{setting.name: 1.0 if setting.default is None else setting.default})


def test_variables_that_are_set_for_a_service_are_not_looked_at(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for setting in SERVER_ONLY:
        monkeypatch.setenv(setting.variable, "nonsense")
    monkeypatch.setenv("PHOTON_NUM_BLOCKS", "48")
    with LLM(write_tiny_model(tmp_path / "tiny"), load_format="dummy", device="cpu") as other:
        assert other._program._facts.num_blocks == 48


@pytest.mark.parametrize("model", [5, b"model", ["a"], {}, 1.5, True])
def test_a_model_that_is_no_path_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"^model: "):
        LLM(model)
