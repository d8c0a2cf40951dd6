"""Callers' descriptors: what JSON can express is read, and all else is refused by name."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import re
import tracemalloc
import weakref
from collections.abc import Callable

import llguidance
import pytest
from google.protobuf import struct_pb2, timestamp_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.json_format import Parse, ParseDict, ParseError

from photon_grpc.core.ask import Origin
from photon_grpc.core.constraint import Constraint
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import InternalFailure, InvalidConstraint, InvalidRequest
from photon_grpc.frontend.output.update import OutputDelta, OutputFinish
from photon_grpc.server.typed import message_type
from photon_grpc.server.typed.message_type import MessageType, MessageTypes, read_message_type
from photon_grpc.server.wire import messages
from photon_grpc.v1 import inference_pb2 as pb
from tests.server.described import add_field, enum, file, message, serialized

LLGUIDANCE = llguidance.LLTokenizer("byte", slices=[])


def takes(made: MessageType, text: str) -> bool:
    """Return whether a text satisfies the grammar."""
    grammar = json.dumps({"grammars": [{"lark_grammar": made.grammar}]})
    limits = llguidance.LLParserLimits(**Constraint("protobuf", grammar).limits)
    matcher = llguidance.LLMatcher(LLGUIDANCE, grammar, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


async def found(types: MessageTypes, request: pb.StructuredOutput.Protobuf, caller: str = "") -> MessageType:
    typed = types.wanted(request, Origin(0.0, caller=caller))
    await typed.constraint()
    assert typed.found is not None
    return typed.found


def of_field(text: str, *, syntax: str = "proto3") -> MessageType:
    described = file(syntax=syntax)
    enum(described, "Color", "COLOR_NONE", "RED")
    message(described, "Inner", "id: int32")
    message(described, "Outer", text)
    return read_message_type(serialized(described), "acme.Outer")


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("v: int32", "0 7 -7 2147483647 -2147483648 1999999999", "-0 01 2147483648 -2147483649 1.0 1e3 9999999999"),
        ("v: sfixed32", "-2147483648", "2147483648"),
        ("v: uint32", "0 4294967295", "-1 4294967296"),
        ("v: int64", '"0" "9223372036854775807" "-9223372036854775808"', '5 "9223372036854775808" "-0" "01" ""'),
        ("v: fixed64", '"18446744073709551615"', '"18446744073709551616" "-1"'),
        ("v: float", "0 -0 1.5 1e21 -999999999999999.5e21 1E-45", "1e22 1e39 .5 1. NaN +1 01 1e+"),
        ("v: double", "1e289 1e-290 123456789012345", "1e309 1e290 Infinity 1234567890123456"),
        ("v: bool", "true false", '1 "true" True'),
        ("v: string", r'"" "é🙂" "\n\"\\\/" "A" "\ud83d\ude00"', r'"\ud83d" "\ude00" "\ud83dx" "\x41" \''),
        ("v: bytes", '"" "QUI=" "QQ==" "QUJD" "+/+/"', '"Q" "QQ" "QUI" "QQ=" "QUJ=" "QR==" "_-_-"'),
        ("v: .acme.Color", '"RED"', '"BLUE" 1 "red" null'),
        ("v: .acme.Inner", '{} {"id":1}', '{"id":1,"id":2} {"x":1} {"id":null} null'),
        ("v: repeated bool", "[] [true] [true,false]", "[null] [true,] {}"),
        ("v: map string bool", '{} {"":true} {"a":true,"b":false}', '{"a":null} {a:true} {"\\ud83d":true}'),
        ("v: map bool int32", '{"true":1} {"false":1,"true":2}', '{"true":1,"true":2} {"true":1,"false":2} {"no":1}'),
        ("v: map int64 bool", '{"-9223372036854775808":true}', '{"9223372036854775808":true} {"-0":true} {5:true}'),
        ("v: map uint32 .acme.Inner", '{"7":{}} {"4294967295":{}}', '{"-7":{}} {"07":{}} {7:{}} {"4294967296":{}}'),
        ("v: .google.protobuf.Timestamp", '"2024-02-28T23:59:59Z" "0001-01-01T00:00:00.000000001Z"', '"2024-02-29T00:00:00Z" "0000-01-01T00:00:00Z" "2024-13-01T00:00:00Z" "2024-01-01T24:00:00Z"'),  # noqa: E501
        ("v: .google.protobuf.Duration", '"0s" "-1.500s" "315576000000s"', '"315576000001s" "315576000000.5s" "1" "1.5s" "--1s"'),  # noqa: E501
        ("v: .google.protobuf.FieldMask", '"" "a" "fooBar.baz,x1"', '"a_b" "A" "a," ".a"'),
        ("v: .google.protobuf.Struct", '{} {"a":{"b":[null,1.5,"x",true]}}', '[] {"a":NaN}'),
        ("v: .google.protobuf.Value", 'null 1 "x" [] {"a":[]}', "nul"),
        ("v: .google.protobuf.ListValue", "[] [1,[2]]", "{} null"),
        ("v: .google.protobuf.NullValue", "null", '"x" 0'),
        ("v: repeated .google.protobuf.NullValue", '["NULL_VALUE"]', "[null]"),
        ("v: .google.protobuf.Int64Value", '"5"', "5 null"),
        ("v: .google.protobuf.BoolValue", "true", "null"),
        ("v: .google.protobuf.Empty", "{}", "null"),
    ],
)  # fmt: skip
def test_values_of_the_type_are_those_that_protobuf_parses(field: str, good: str, bad: str) -> None:
    made = of_field(field)
    for value in good.split():
        text = f'{{"v":{value}}}'
        assert takes(made, text), value
        parsed = made.parse(text)
        assert made.message_class.FromString(parsed.SerializeToString()) is not None
    for value in bad.split():
        assert not takes(made, f'{{"v":{value}}}'), value


@pytest.mark.parametrize(
    ("field", "text", "plain"),
    [
        ("v: map string int32", '{"a":1,"b":2,"a":3}', '{"a":3,"b":2}'),
        ("v: map string int32", r'{"a":1,"\u0061":2,"\ud83d\ude00":3,"😀":4}', '{"a":2,"😀":4}'),
        ("v: map sfixed64 bool", '{"-5":true,"5":true,"-5":false}', '{"-5":false,"5":true}'),
        ("v: map bool string", '{"false":"a","true":"b"}', '{"false":"a","true":"b"}'),
        ("v: map string .acme.Inner", '{"a":{"id":1},"a":{}}', '{"a":{}}'),
        ("v: map string .google.protobuf.Struct", '{"a":{"b":1,"b":2},"c":{},"c":{"b":[{"d":1,"d":"x"}]}}',
         '{"a":{"b":2},"c":{"b":[{"d":"x"}]}}'),
        ("v: map string .google.protobuf.Value", '{"a":[1],"a":null}', '{"a":null}'),
        ("v: .google.protobuf.Struct", '{"a":{"b":1},"a":{"c":-0.5e-7}}', '{"a":{"c":-5e-8}}'),
        ("v: repeated .google.protobuf.Struct", '[{"a":1},{"a":2,"a":3}]', '[{"a":1},{"a":3}]'),
        ("v: map string double", '{"a":1e289,"a":1e-290}', '{"a":1e-290}'),
    ],
)  # fmt: skip
def test_a_key_that_a_map_has_twice_keeps_its_last_value(field: str, text: str, plain: str) -> None:
    """`plain` has each key once, so protobuf's own parser accepts it."""
    made = of_field(field)
    twice, once = f'{{"v":{text}}}', f'{{"v":{plain}}}'
    assert takes(made, twice)
    assert made.parse(twice) == Parse(once, made.message_class())
    assert made.parse(twice) == ParseDict(json.loads(twice), made.message_class())


def test_fields_appear_once_and_in_order_and_one_of_each_oneof() -> None:
    described = file()
    message(
        described, "Outer", "a_b: int32", "x: oneof pick int32", "c: int32", "y: oneof pick bool", "z: optional int32"
    )
    made = read_message_type(serialized(described), "acme.Outer")
    for text in ("{}", '{"aB":1}', '{"aB":1,"x":2,"c":3}', '{"y":true,"c":3,"z":4}', '{"z":1}', '{"x":1}'):
        assert takes(made, text) and made.parse(text) is not None
    for text in ('{"c":1,"aB":1}', '{"aB":1,"aB":1}', '{"x":1,"y":true}', '{"a_b":1}', '{"aB":1,}', "{ }", '{,"c":1}'):
        assert not takes(made, text), text


def test_required_fields_are_there() -> None:
    described = file(syntax="proto2")
    message(described, "Outer", "a: int32", "b: required int32", "c: int32", "d: required .acme.Outer2")
    message(described, "Outer2", "e: required bool")
    made = read_message_type(serialized(described), "acme.Outer")
    assert takes(made, '{"b":1,"d":{"e":true}}') and takes(made, '{"a":0,"b":1,"c":2,"d":{"e":true}}')
    for text in ("{}", '{"a":1}', '{"b":1}', '{"b":1,"d":{}}', '{"d":{"e":true}}'):
        assert not takes(made, text), text


def test_messages_nest_as_deeply_as_parsers_allow() -> None:
    described = file()
    message(described, "Tree", "left: .acme.Tree", "at: map string .acme.Tree", "list: repeated .acme.Tree")
    made = read_message_type(serialized(described), "acme.Tree")

    def nested(depth: int) -> str:
        return '{"left":' * (depth - 1) + "{}" + "}" * (depth - 1)

    assert takes(made, nested(32)) and not takes(made, nested(33))
    assert made.message_class.FromString(made.parse(nested(32)).SerializeToString()) is not None
    loose = of_field("v: .google.protobuf.Value")
    assert takes(loose, '{"v":' + '{"a":' * 7 + "1" + "}" * 8) and not takes(loose, '{"v":' + "[" * 13)


def test_a_large_recursive_type_nests_less_deep() -> None:
    described = file()
    message(described, "Wide", *[f"f{number}: .acme.Wide" for number in range(100)])
    made = read_message_type(serialized(described), "acme.Wide")
    assert takes(made, '{"f1":{"f2":{"f3":{}}}}') and not takes(made, '{"f1":' * 8 + "{}" + "}" * 8)


def test_names_are_written_as_json_has_them() -> None:
    described = file()
    made = message(described, "Outer", "a: int32", "b: int32")
    made.field[0].json_name, made.field[1].json_name = 'q"\\é🙂', "[x.y]"
    read = read_message_type(serialized(described), "acme.Outer")
    text = json.dumps({'q"\\é🙂': 1, "[x.y]": 2}, ensure_ascii=False, separators=(",", ":"))
    assert takes(read, text)
    assert [value for _, value in read.parse(text).ListFields()] == [1, 2]


def test_a_root_may_be_a_well_known_type() -> None:
    set_ = serialized(file())
    assert takes(read_message_type(set_, "google.protobuf.Timestamp"), '"2024-01-01T00:00:00Z"')
    assert takes(read_message_type(set_, "google.protobuf.Value"), "null")


async def test_a_well_known_type_needs_no_set() -> None:
    made = await found(MessageTypes(), pb.StructuredOutput.Protobuf(message_type="google.protobuf.Timestamp"))
    assert takes(made, '"2024-01-01T00:00:00Z"')
    with pytest.raises(InvalidRequest, match="file_descriptor_set: must not be empty"):
        await found(MessageTypes(), pb.StructuredOutput.Protobuf(message_type="google.protobuf.Missing"))


def test_imports_may_come_in_any_order_and_well_known_files_are_ours() -> None:
    first, second = file("a.proto", imports=("b.proto",)), file("b.proto")
    message(first, "Outer", "v: .acme.Inner", "t: .google.protobuf.Timestamp")
    message(second, "Inner", "id: int32")
    false = FileDescriptorProto(name=timestamp_pb2.DESCRIPTOR.name, package="google.protobuf", syntax="proto3")
    message(false, "Timestamp", "wrong: string")
    made = read_message_type(serialized(first, second, false), "acme.Outer")
    assert made.parse('{"v":{"id":3},"t":"2024-01-01T00:00:00Z"}').t.seconds == 1704067200  # type: ignore[attr-defined]


def _group(described: FileDescriptorProto) -> None:
    outer = message(described, "Outer", "g: .acme.Outer.G")
    outer.nested_type.add(name="G")
    outer.field[0].type = outer.field[0].TYPE_GROUP


def _deep(described: FileDescriptorProto) -> None:
    for at, name in enumerate(names := ["Outer", *(f"M{number}" for number in range(1, 40))]):
        message(described, name, *[f"o: required .acme.{each}" for each in names[at + 1 : at + 2]])


def _extended(described: FileDescriptorProto) -> None:
    outer = message(described, "Outer", "a: int32")
    outer.extension_range.add(start=100, end=200)
    extra = message(described, "Unused", "b: int32").field[0]
    described.extension.add(name="extra", number=100, label=1, type=extra.type, extendee=".acme.Outer")


def _collision(described: FileDescriptorProto) -> None:
    message(described, "Outer", "a: oneof pick int32", "b: int32").field[1].json_name = "pick"


def _impostor(described: FileDescriptorProto) -> None:
    described.package = "google"
    message(described, "Outer", "t: .google.protobuf.Duration2")
    message(described, "protobuf").nested_type.add(name="Duration2")


def _no_map(described: FileDescriptorProto) -> None:
    message(described, "Outer", "m: map string int32").nested_type[0].field[1].name = "worth"


BAD: dict[str, tuple[Callable[[FileDescriptorProto], object], str]] = {
    "any": (lambda f: message(f, "Outer", "detail: .google.protobuf.Any"), r"acme\.Outer\.detail is a google"),
    "any in a map": (lambda f: message(f, "Outer", "m: map string .google.protobuf.Any"), r"acme\.Outer\.m is a goo"),
    "group": (_group, r"acme\.Outer\.g is a group"),
    "extension": (_extended, r"acme\.extra extends acme\.Outer"),
    "endless": (lambda f: message(f, "Outer", "o: required .acme.Outer"), "more than 32 messages within"),
    "deep": (_deep, "more than 32 messages within"),
    "oneof and field": (_collision, "'pick' in JSON"),
    "python": (lambda f: message(f, "Outer", "DESCRIPTOR: int32"), r"acme\.Outer\.DESCRIPTOR: .* name"),
    "unknown type": (lambda f: message(f, "Outer", "v: .acme.Missing"), "acme.proto' is invalid: .*acme.Missing"),
    "twice": (lambda f: [message(f, "Outer"), message(f, "Outer")], "invalid: .*acme.Outer"),
    "import": (lambda f: f.dependency.append("gone.proto"), "'acme.proto' imports 'gone.proto', which is not in it"),
    "itself": (lambda f: f.dependency.append("acme.proto"), "imports itself"),
    "no map": (_no_map, r"acme\.Outer\.m: .* is not an entry of a map"),
    "impostor": (_impostor, r"google\.protobuf\.Duration2 is defined in acme\.proto, not by protobuf"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_json_is_refused_by_name(name: str) -> None:
    described = file(syntax="proto2")
    write, words = BAD[name]
    write(described)
    with pytest.raises(InvalidConstraint) as caught:
        read_message_type(serialized(described), f"{described.package}.Outer")
    assert caught.value.field == "structured_output.protobuf.file_descriptor_set"
    assert re.search(words, caught.value.message), caught.value.message


def test_names_that_are_one_in_json_are_refused() -> None:
    described = file()
    message(described, "Outer", "a_b: int32", "aB: int32")
    with pytest.raises(InvalidConstraint, match="aB"):
        read_message_type(serialized(described), "acme.Outer")


@pytest.mark.parametrize(
    ("num_messages", "num_fields", "num_values", "limit"), [(1, 129, 0, 128), (6, 100, 0, 512), (1, 1, 2049, 2048)]
)
def test_too_large_types_are_refused_with_both_numbers(
    num_messages: int, num_fields: int, num_values: int, limit: int
) -> None:
    described = file()
    enum(described, "Color", "COLOR_NONE", *[f"C{number}" for number in range(num_values)])
    for at in range(num_messages):
        made = message(described, f"M{at}", *[f"f{number}: .acme.Color" for number in range(num_fields)])
        if at + 1 < num_messages:
            add_field(made, f"next: .acme.M{at + 1}")
    with pytest.raises(InvalidConstraint) as caught:
        read_message_type(serialized(described), "acme.M0")
    assert caught.value.limit == limit and (caught.value.needed or 0) > limit
    assert str(caught.value.needed) in caught.value.message and str(limit) in caught.value.message


def test_invalid_descriptor_sets_are_refused() -> None:
    good, twice = serialized(file()), serialized(file(), file())
    for files, words in (
        (b"\xff\xff", "not a serialized"),
        (good[:-3], "not a serialized"),
        (twice, "'acme.proto' is in it 2 times"),
        (b"\x0a\x00" * 40_000, "32769 fields or more; 32768 are allowed"),
    ):
        with pytest.raises(InvalidConstraint, match=words):
            read_message_type(files, "acme.Outer")
    with pytest.raises(InvalidConstraint, match=r"no message 'acme\.Outer'") as caught:
        read_message_type(good, "acme.Outer")
    assert caught.value.field == "structured_output.protobuf.message_type"


async def test_types_are_read_once_and_kept_within_bounds() -> None:
    described = file()
    message(described, "Outer", "a: int32")
    request = pb.StructuredOutput.Protobuf(file_descriptor_set=serialized(described), message_type="acme.Outer")
    types = MessageTypes()
    assert await found(types, request) is await found(types, request)
    few = MessageTypes(max_cache_bytes=1)
    assert await found(few, request) is not await found(few, request)
    made = await asyncio.gather(*[found(types, request) for _ in range(3)], found(few, request))
    assert len(set(map(id, made))) == 2


async def test_small_types_are_charged_for_their_memory() -> None:
    """Even a type with a set of about forty bytes takes at least 44 KiB."""
    types = MessageTypes(max_cache_bytes=2**20)
    made = []
    for number in range(2**20 // (44 * 2**10)):
        described = file()
        message(described, f"Outer{number}", "a: int32")
        name = f"acme.Outer{number}"
        request = pb.StructuredOutput.Protobuf(file_descriptor_set=serialized(described), message_type=name)
        made.append((request, await found(types, request)))
    (oldest, first), (newest, last) = made[0], made[-1]
    assert await found(types, newest) is last
    assert await found(types, oldest) is not first


class _Malloc(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
@pytest.mark.parametrize(("num_messages", "num_fields"), [(1, 1), (1, 100), (20, 20), (100, 1)])
def test_a_type_is_charged_for_memory_outside_python(num_messages: int, num_fields: int) -> None:
    """tracemalloc does not see protobuf's descriptors."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Malloc

    def taken() -> int:
        gc.collect()
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    def made(number: int) -> tuple[MessageType, int]:
        described = file()
        for at in range(num_messages):
            message(described, f"Outer{number}M{at}", *(f"f{field}: string" for field in range(num_fields)))
        files = serialized(described)
        read = read_message_type(files, f"acme.Outer{number}M0")
        return read, message_type._num_bytes(read)

    made(0)
    before = taken()
    kept = [made(number) for number in range(1, 30)]
    assert 0.3 * sum(num_bytes for _, num_bytes in kept) < taken() - before < 1.1 * sum(each[1] for each in kept)


async def test_released_types_free_their_memory_without_the_garbage_collector() -> None:
    """Their classes are cyclic: thousands of them would hold half a gigabyte that nothing uses."""
    types, classes = MessageTypes(max_cache_bytes=2**20), []
    gc.disable()
    try:
        for number in range(100):
            described = file()
            message(described, f"Outer{number}", "a: int32")
            request = pb.StructuredOutput.Protobuf(
                file_descriptor_set=serialized(described), message_type=f"acme.Outer{number}"
            )
            classes.append(weakref.ref((await found(types, request)).message_class))
        assert sum(each() is not None for each in classes) <= 2 * 2**20 // (44 * 2**10)
    finally:
        gc.enable()


async def test_types_of_one_caller_do_not_evict_those_of_another() -> None:
    types = MessageTypes(max_cache_bytes=2**20)

    async def found_by(name: str, caller: str) -> MessageType:
        described = file()
        message(described, name, "a: int32")
        request = pb.StructuredOutput.Protobuf(file_descriptor_set=serialized(described), message_type=f"acme.{name}")
        return await found(types, request, caller)

    first = await found_by("Mine", "b")
    for number in range(100):
        await found_by(f"Outer{number}", "a")
    assert await found_by("Mine", "b") is first


async def test_mutually_recursive_messages_are_charged_for_their_grammars() -> None:
    """Such a type takes more than 40 times its set."""
    types = MessageTypes(max_cache_bytes=2**18)
    tracemalloc.start()
    try:
        for number in range(14):
            described = file()
            for name in ("One", "Other"):
                message(described, name, *(f"f{number}{at}: {('One', 'Other')[at % 2]}" for at in range(8)))
            request = pb.StructuredOutput.Protobuf(file_descriptor_set=serialized(described), message_type="acme.One")
            await found(types, request)
            if number == 0:  # includes what is made only once
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 2**18
    finally:
        tracemalloc.stop()


async def test_empty_and_too_long_fields_are_named() -> None:
    types = MessageTypes()
    for name in ("file_descriptor_set", "message_type"):
        request = pb.StructuredOutput.Protobuf(file_descriptor_set=b"x", message_type="x")
        request.ClearField(name)
        with pytest.raises(InvalidRequest) as caught:
            await found(types, request)
        assert caught.value.field == f"structured_output.protobuf.{name}"
    with pytest.raises(InvalidConstraint) as too_long:
        await found(types, pb.StructuredOutput.Protobuf(file_descriptor_set=bytes(2**20 + 1), message_type="x"))
    assert (too_long.value.needed, too_long.value.limit) == (2**20 + 1, 2**20)


def test_json_of_another_type_is_a_parse_error() -> None:
    made = read_message_type(serialized(file()), struct_pb2.Struct.DESCRIPTOR.full_name)
    with pytest.raises(ParseError):
        made.parse("[]")
    with pytest.raises(ValueError, match="delimiter"):
        made.parse('{"a":1')


async def test_a_complete_output_that_is_no_message_is_an_internal_failure_without_details(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = read_message_type(serialized(file()), "google.protobuf.Struct")
    for text in (b'{"secret":1,"secret"', b'{"secret' * 1000):
        delta = OutputDelta(0, finish=OutputFinish(FinishReason.EOS, message_json=text))
        with pytest.raises(InternalFailure) as caught:
            await messages.add([pb.Output()], [delta], made)
        assert "secret" not in caught.value.message + caplog.text and "google.protobuf.Struct" in caplog.text
