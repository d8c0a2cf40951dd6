"""The table of an API's fields: what a body sets, what has no effect, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.errors import FeatureNotSupported, InvalidRequest, PhotonError
from photon_grpc.gateway.calls.fields import Accepted, Refused, Supported, groups, names, read

TABLE = {
    "temperature": Supported(float, "temperature"),
    "stop": Supported(tuple[str, ...], "stop_strings"),
    "n": Supported(int, "num_outputs"),
    "logit_bias": Supported(Mapping[int, float], "logit_bias"),
    "echo": Supported(bool),
    "store": Accepted("nothing is stored"),
    "best_of": Refused("use n", (1,)),
}


def test_fields_are_sorted_by_their_effect() -> None:
    values = read(TABLE, {"temperature": 1, "stop": ["a"], "echo": True, "store": True, "best_of": 1})
    assert values.supported == {"temperature": 1.0, "stop": ("a",), "echo": True}
    assert values.ignored == ("store",)
    assert groups(TABLE, values.supported) == {"sampling": {"temperature": 1.0}, "stop": {"stop_strings": ("a",)}}


def test_null_is_unset() -> None:
    values = read(TABLE, dict.fromkeys(TABLE))
    assert values == ({}, ())


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"xyz": 1}, "xyz", "there is no such field"),
        ({"temperature": "hot"}, "temperature", "expected `float`, got `str`"),
        ({"n": True}, "n", "expected `int`, got `bool`"),
        ({"n": 1.5}, "n", "expected `int`, got `float`"),
        ({"stop": ["a", 1]}, "stop[1]", "expected `str`, got `int`"),
        ({"logit_bias": {"1": 2, "a": 1}}, 'logit_bias["a"]', "the name must be a whole number"),
        ({"logit_bias": {"1": 2, "5": "x"}}, 'logit_bias["5"]', "expected `float`, got `str`"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text.replace("?", r"\?")) as caught:
        read(TABLE, body)
    assert caught.value.field == field


@pytest.mark.parametrize("value", [2, True, 1.0, "1", [1]])
def test_a_refused_field_takes_only_its_harmless_values(value: Any) -> None:
    with pytest.raises(FeatureNotSupported, match="best_of: use n"):
        read(TABLE, {"best_of": value})


def test_two_names_of_one_option_must_agree() -> None:
    table = {"session_id": Supported(str, "session_id"), "prompt_cache_key": Supported(str, "session_id")}
    assert groups(table, dict.fromkeys(table, "a")) == {"cache": {"session_id": "a"}}
    with pytest.raises(InvalidRequest, match="prompt_cache_key: session_id has a different value") as caught:
        groups(table, {"session_id": "a", "prompt_cache_key": "b"})
    assert caught.value.field == "prompt_cache_key"


def test_errors_name_fields_as_the_api_does() -> None:
    assert names(TABLE)["sampling.num_outputs"] == "n"
    # A list of token ids is a message in gRPC.
    assert names({"ids": Supported(tuple[int, ...], "allowed_token_ids")})["sampling.allowed_token_ids.ids"] == "ids"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted(TABLE)) | st.text(), JSON, max_size=4))
def test_any_json_is_read_or_refused(body: dict[str, Any]) -> None:
    try:
        values = read(TABLE, body)
    except PhotonError as error:
        assert error.field or "" in body
    else:
        assert set(values.supported) | set(values.ignored) <= set(body)
