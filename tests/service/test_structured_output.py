"""Constraints over gRPC: every kind is obeyed, and what is wrong is refused by the name of its field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from photon_grpc.client import SyncClient
from photon_grpc.errors import InvalidConstraint, InvalidRequest, PhotonError
from tests.service.running import RunningService, serving
from tests.service.tiny import write_tiny_model

OPTIONS = {"temperature": 1.5, "max_tokens": 48}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    model: Path = write_tiny_model(tmp_path_factory.mktemp("constrained") / "tiny")
    with serving("--model", str(model), "--load-format", "dummy", "--num-blocks", "512") as service:
        service.wait_ready()
        yield service


@pytest.fixture
def client(service: RunningService) -> Iterator[SyncClient]:
    with SyncClient(service.wait_ready()[0]) as client:
        yield client


def test_every_kind_is_obeyed_in_one_call_and_in_a_stream(client: SyncClient) -> None:
    assert {"JSON_SCHEMA", "REGEX", "CHOICES", "GRAMMAR"} <= set(client.model().features)
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    bounded = {**schema, "additionalProperties": False}
    text = client.generate("x", json_schema=bounded, seed=3, **OPTIONS).text
    assert json.loads(text)["a"] <= 99
    assert client.generate("x", json_object=True, seed=1, max_tokens=2).text.startswith("{")
    assert re.fullmatch("[a-c]{4}-7", client.generate("x", regex="[a-c]{4}-7", **OPTIONS).text)
    generation = client.generate("x", choices=["yes", "no"], **OPTIONS)
    assert generation.text in ("yes", "no") and generation.finish.reason == "CONSTRAINT_COMPLETE"
    deltas = list(client.stream("x", grammar='start: "(" /[a-z]{2}/ ")"', **OPTIONS))
    assert re.fullmatch(r"\([a-z]{2}\)", "".join(delta.text for delta in deltas))


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"json_schema": {"properties": {"p": {"not": {}}}}}, "json_schema", 'at /properties/p: .*"not"'),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "json_schema", "Unsatisfiable"),
        ({"json_schema": "{"}, "json_schema", "is not JSON"),
        ({"regex": "(?=a)"}, "regex", "look-around"),
        ({"regex": "a" * (2**20 + 1)}, "regex", "1048577 bytes; 1048576 are allowed"),
        ({"grammar": "start: x"}, "grammar", "unknown name"),
        (
            {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(30_000))},
            "grammar",
            "compiling it takes",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(client: SyncClient, options: dict, field: str, words: str) -> None:
    with pytest.raises(InvalidConstraint) as caught:
        client.generate("x", **options, **OPTIONS)
    assert caught.value.field == f"structured_output.{field}"
    assert re.search(words, caught.value.message), caught.value.message


@pytest.mark.parametrize("options", [{"regex": ""}, {"choices": []}, {"choices": ["a", ""]}])
def test_what_says_nothing_is_refused(client: SyncClient, options: dict) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.generate("x", **options)
    assert caught.value.field.startswith("structured_output.") and not isinstance(caught.value, InvalidConstraint)


def test_neighbours_go_on_while_bombs_come(client: SyncClient) -> None:
    alone = client.generate("neighbour", seed=5, max_tokens=40, temperature=1.0).text
    stream = client.stream("neighbour", seed=5, max_tokens=40, temperature=1.0)
    texts = [next(iter(stream)).text]
    for number in range(3):
        with pytest.raises(PhotonError):
            client.generate("x", regex=f"((a{{1,1000}}){{1,1000}}){{1,{1000 + number}}}")
    texts += [delta.text for delta in stream]
    assert "".join(texts) == alone
