"""The benchmark of new grammars: what it asks for is new and compiles, and it measures a real service."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import grammars
from benchmarks.service import free_address, processes, serving
from photon_grpc import demo
from photon_grpc.core.ask import ConstraintAsk
from photon_grpc.frontend.constraints.trial import try_out
from photon_grpc.server.typed.message_type import read_message_type


@pytest.mark.full
def test_schemas_are_new_each_of_two_hundred_lines_and_compile() -> None:
    schemas = [grammars.schema(number) for number in range(20)]
    assert len(set(schemas)) == len(schemas)
    for schema in schemas:
        assert 200 <= schema.count("\n") + 1 < 260
        try_out(ConstraintAsk("json_schema", schema))


@pytest.mark.full
def test_small_ones_are_new_of_every_kind_and_compile() -> None:
    made = [grammars.small(number) for number in range(80)]
    assert len({each.SerializeToString() for each in made}) == len(made)
    kinds = [each.WhichOneof("constraint") for each in made]
    assert set(kinds) == {"json_schema", "regex", "choices", "grammar", "protobuf"}
    for kind, each in zip(kinds, made, strict=True):
        if kind == "protobuf":
            files, name = each.protobuf.file_descriptor_set, each.protobuf.message_type
            try_out(read_message_type(files, name).constraint)
        elif kind == "choices":
            try_out(ConstraintAsk("choices", choices=tuple(each.choices.values)))
        else:
            try_out(ConstraintAsk(kind, getattr(each, kind)))


@pytest.mark.slow
@pytest.mark.full
def test_every_part_is_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "NUM_BESIDE", 4)
    monkeypatch.setattr(grammars, "_TOLD_S", 0.1)
    bombs = grammars.bombs()
    monkeypatch.setattr(grammars, "bombs", lambda: {name: bombs[name] for name in ("10⁹ repetitions", "every reading")})
    flags = "--requests 2 --streams 2 --seconds 0.5 --rounds 1 --count 8 --every 4"
    metrics = free_address()
    with serving("--device", "cpu", "--model", str(demo.DRAFT), "--metrics-listen", metrics) as target:
        assert list(processes(target)) == ["engine", "frontend 0", "encoder 0"]
        asyncio.run(grammars.measure(target, metrics, grammars.arguments(flags.split())))
    shown = capsys.readouterr().out
    for row in ("| new schema |", "| new schemas |", "| 8 |", "| 10⁹ repetitions |", "| every reading | 0.0 |"):
        assert row in shown, row
    assert "INVALID_ARGUMENT: structured_output.regex" in shown
    assert shown.count("loop lag") == 3
