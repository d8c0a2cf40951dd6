"""Rules of protovalidate: the grammar of an answer holds them, its own library says whether an answer keeps them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.config.service_files import ServiceFile
from photon_grpc.errors import AnswerInvalid, ConfigError, InvalidRequest
from photon_grpc.server.services.rules.patterns import whole_text
from photon_grpc.server.services.rules.ranges import decimals, integers
from photon_grpc.server.services.service_set import ServedMethod, ServiceSet, read_services
from photon_grpc.v1 import service_pb2
from tests.examples import examples
from tests.server.ruled import CASES, ruled
from tests.server.test_services import random_answer

QUESTION = "message Question { string text = 1; }\n"


def read(data: bytes, *, skip: bool = False) -> ServiceSet:
    return read_services([ServiceFile("t.binpb", data)], skip=skip)


def replying(fields: str, options: str = "") -> ServiceSet:
    return read(ruled(f"{QUESTION} message Reply {{ {options} {fields} }}"))


def asking(fields: str) -> ServedMethod:
    return read(ruled(f"message Question {{ {fields} }} message Reply {{}}")).methods[0]


def answers(method: ServedMethod, count: int) -> list[Any]:
    texts = [random_answer(method.constraint.text, seed) for seed in range(count)]
    return [ParseDict(json.loads(text), method.response_class()) for text in texts]


# --- answers -----


def conformance() -> bytes:
    """Return protovalidate's conformance cases, each as the answer of a method."""
    found = FileDescriptorSet.FromString(CASES)
    for number, file in enumerate(found.file):
        if "conformance" not in file.name:
            continue
        service = file.service.add(name=f"Service{number}")
        for message in file.message_type:
            name = f".{file.package}.{message.name}"
            service.method.add(name=message.name, input_type=name, output_type=name)
    return found.SerializeToString()


def test_random_answers_keep_all_rules_that_no_warning_names() -> None:
    found = read(conformance(), skip=True)
    (line,) = [each for each in found.warnings if "ANSWER_INVALID" in each]
    assert "; and " in line
    assert len(found.methods) > 700
    num_held = 0
    for seed, method in enumerate(found.methods):
        message = method.response_class.DESCRIPTOR
        if method.rules.only_checked(message, _forms(method)):
            continue
        num_held += 1
        for text in {random_answer(method.constraint.text, seed + at) for at in range(examples(4))}:
            method.rules.check_answer(ParseDict(json.loads(text), method.response_class()))
    assert num_held > 500


def _forms(method: ServedMethod) -> Any:
    """Return the forms, asked for every field that the answer reaches."""
    forms = method.rules.forms(method.options.bounds)
    waiting, seen = [method.response_class.DESCRIPTOR], set[str]()
    while waiting:
        message: Any = waiting.pop()
        for field in message.fields if message.full_name not in seen else ():
            forms.of(field)
            waiting += [field.message_type] if field.message_type else []
        seen.add(message.full_name)
    return forms


HELD = {
    "length": "string a = 1 [(buf.validate.field).string = {min_len: 2, max_len: 5}];",
    "bytes of text": "string a = 1 [(buf.validate.field).string = {min_bytes: 2, max_bytes: 5}];",
    "pattern": r'string a = 1 [(buf.validate.field).string.pattern = "^[A-Z]{3}-\\d+$"];',
    "pattern anywhere": 'string a = 1 [(buf.validate.field).string.pattern = "ab|^c|d$"];',
    "affixes": 'string a = 1 [(buf.validate.field).string = {prefix: "a/", suffix: "\\"", contains: "."}];',
    "without": 'string a = 1 [(buf.validate.field).string = {not_contains: "a", not_in: ["b", ""], max_len: 3}];',
    "in": 'string a = 1 [(buf.validate.field).string = {in: ["x\\n", "é", "(a|b)"]}];',
    "email": "string a = 1 [(buf.validate.field).string.email = true];",
    "uuid": "string a = 1 [(buf.validate.field).string.uuid = true];",
    "range": "int32 a = 1 [(buf.validate.field).int32 = {gte: 1, lte: 3}];",
    "long range": "int64 a = 1 [(buf.validate.field).int64 = {gt: 461168601842738790, not_in: [461168601842738791]}];",
    "outside": "int32 a = 1 [(buf.validate.field).int32 = {gt: 5, lt: -5}];",
    "double": "double a = 1 [(buf.validate.field).double = {gt: 0.25, lt: 0.5}];",
    "float": "float a = 1 [(buf.validate.field).float = {gt: 16777216, lte: 16777220}];",
    "enum": "enum E { A = 0; B = 1; C = 2; } E a = 1 [(buf.validate.field).enum.not_in = 0];",
    "list": (
        "repeated string a = 1 [(buf.validate.field).repeated = "
        "{min_items: 2, max_items: 4, items: {string: {len: 1}}}];"
    ),
    "map": (
        "map<int32, string> a = 1 [(buf.validate.field).map = "
        "{min_pairs: 1, max_pairs: 3, keys: {int32: {gt: 0}}, values: {string: {min_len: 1}}}];"
    ),
    "one item": "repeated string a = 1 [(buf.validate.field).repeated.max_items = 1];",
    "exactly one item": "repeated string a = 1 [(buf.validate.field).repeated = {min_items: 1, max_items: 1}];",
    "no item": "repeated string a = 1 [(buf.validate.field).repeated.max_items = 0];",
    "any number of items": "repeated string a = 1 [(buf.validate.field).repeated.max_items = 18446744073709551615];",
    "one pair": "map<string, int32> a = 1 [(buf.validate.field).map.max_pairs = 1];",
    "exactly one pair": "map<int32, int32> a = 1 [(buf.validate.field).map = {min_pairs: 1, max_pairs: 1}];",
    "one of two keys": "map<bool, int32> a = 1 [(buf.validate.field).map.keys.bool.const = true];",
    "both keys": "map<bool, int32> a = 1 [(buf.validate.field).map.min_pairs = 2];",
    "one key": "map<bool, int32> a = 1 [(buf.validate.field).map = {min_pairs: 1, max_pairs: 1}];",
    "no key": "map<bool, int32> a = 1 [(buf.validate.field).map.max_pairs = 0];",
    "many bytes of text": "string a = 1 [(buf.validate.field).string.min_bytes = 600];",
    "so many bytes of text": "string a = 1 [(buf.validate.field).string.len_bytes = 1000];",
    "long constant": f'string a = 1 [(buf.validate.field).string.const = "{"x" * 600}"];',
    "long prefix": f'string a = 1 [(buf.validate.field).string.prefix = "{"x" * 600}"];',
    "long pattern": 'string a = 1 [(buf.validate.field).string.pattern = "^[a-z]{600}$"];',
    "large float": "float a = 1 [(buf.validate.field).float.gt = 1e38];",
    "large double": "double a = 1 [(buf.validate.field).double = {gt: 0.5, lte: 1e308}];",
    "constant beyond ASCII": 'string a = 1 [(buf.validate.field).string = {in: ["é", "éé"], max_bytes: 2}];',
    "prefix and length": 'string a = 1 [(buf.validate.field).string = {prefix: "ab", min_len: 4, max_len: 5}];',
    "end of a month": (
        "google.protobuf.Timestamp a = 1 [(buf.validate.field) = "
        "{required: true, timestamp: {gte: {seconds: 1709164800}, lt: {seconds: 1709251200}}}];"
    ),
    "bytes": "bytes a = 1 [(buf.validate.field).bytes = {min_len: 2, max_len: 4}];",
    "duration": (
        "google.protobuf.Duration a = 1 [(buf.validate.field) = "
        "{required: true, duration: {gt: {nanos: 1}, lt: {seconds: 9}}}];"
    ),
    "time": (
        "google.protobuf.Timestamp a = 1 [(buf.validate.field) = "
        "{required: true, timestamp: {gt: {seconds: 1700000000}}}];"
    ),
    "wrapper": "google.protobuf.StringValue a = 1 [(buf.validate.field) = {required: true, string: {min_len: 1}}];",
    "required": (
        "string a = 1 [(buf.validate.field).required = true];"
        " Reply b = 2 [(buf.validate.field).ignore = IGNORE_ALWAYS];"
    ),
    "oneof": "oneof pick { option (buf.validate.oneof).required = true; string a = 1; int32 b = 2; }",
    "unless zero": "string a = 1 [(buf.validate.field) = {string: {uuid: true}, ignore: IGNORE_IF_ZERO_VALUE}];",
}


@pytest.mark.parametrize("case", HELD)
def test_the_grammar_holds_a_rule(case: str) -> None:
    found = replying(HELD[case])
    assert found.warnings == ()
    for answer in answers(found.methods[0], examples(32)):
        found.methods[0].rules.check_answer(answer)


CHECKED = {
    "cel": (
        'string a = 1 [(buf.validate.field).cel = {id: "not.a", expression: "this != \'a\'"}];',
        "acme.v1.Reply.a: cel not.a",
        '{"a": "a"}',
    ),
    "unique": (
        "repeated int32 a = 1 [(buf.validate.field).repeated.unique = true];",
        "acme.v1.Reply.a: unique",
        '{"a": [1, 1]}',
    ),
    "bytes of a text beyond ASCII": (
        'string a = 1 [(buf.validate.field).string = {prefix: "é", max_bytes: 4}];',
        "acme.v1.Reply.a: string.max_bytes",
        '{"a": "ééé"}',
    ),
    "flags": (
        'string a = 1 [(buf.validate.field).string.pattern = "(?i)^x$"];',
        "acme.v1.Reply.a: string.pattern",
        '{"a": "y"}',
    ),
    "moving time": (
        "google.protobuf.Timestamp a = 1 [(buf.validate.field).timestamp.lt_now = true];",
        "acme.v1.Reply.a: timestamp.lt_now",
        '{"a": "9000-01-01T00:00:00Z"}',
    ),
}


@pytest.mark.parametrize("case", CHECKED)
def test_what_no_grammar_holds_is_named_at_start_and_checked(case: str) -> None:
    field, warning, broken = CHECKED[case]
    found = replying(field)
    (line,) = found.warnings
    assert line.endswith(warning)
    method = found.methods[0]
    with pytest.raises(AnswerInvalid, match="a rule of a: "):
        method.rules.check_answer(ParseDict(json.loads(broken), method.response_class()))


def test_a_cel_rule_of_a_message_is_named_and_checked() -> None:
    rule = 'option (buf.validate.message).cel = {id: "a.b", expression: "this.a <= this.b"};'
    found = replying("int32 a = 1; int32 b = 2;", rule)
    assert found.warnings[0].endswith("acme.v1.Reply: cel a.b")
    with pytest.raises(AnswerInvalid, match=r"its message.*\[a\.b\]"):
        found.methods[0].rules.check_answer(found.methods[0].response_class(a=1))


def test_rules_of_recursive_messages_end() -> None:
    method = replying(
        "repeated Reply a = 1 [(buf.validate.field).repeated.max_items = 2]; string b = 2 "
        "[(buf.validate.field).string.min_len = 1];"
    ).methods[0]
    for answer in answers(method, 20):
        method.rules.check_answer(answer)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("int32 a = 1 [(buf.validate.field).int32 = {gt: 5, lt: 5}];", "Reply.a: no value keeps all of its rules"),
        ("string a = 1 [(buf.validate.field).string = {const: \"ab\", len: 3}];", "Reply.a: no value keeps all"),
        ("repeated int32 a = 1 [(buf.validate.field).repeated = {min_items: 3, max_items: 2}];", "Reply.a: no number"),
        ("map<bool, int32> a = 1 [(buf.validate.field).map.min_pairs = 3];", "Reply.a: a map with 2 possible keys"),
        ("float a = 1 [(buf.validate.field).float.gt = 3.4028235e38];", "Reply.a: no value keeps all"),
        (
            "oneof o { string a = 1 [(buf.validate.field).required = true]; "
            "int32 b = 2 [(buf.validate.field).required = true]; }",
            "Reply.o: two fields of a oneof are required",
        ),
        ("string a = 1 [(buf.validate.field).int32.gt = 5];", "Reply has rules that do not compile"),
        ('string a = 1 [(buf.validate.field).cel = {id: "x", expression: "this +"}];', "do not compile"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_kept_are_refused_at_start(field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"acme.v1.Ruled.Ask: .*{words}"):
        replying(field)


# --- requests -----


@pytest.mark.parametrize(
    ("fields", "request_json", "field", "words"),
    [
        ("string a = 1 [(buf.validate.field).string.min_len = 3];", '{"a": "xy"}', "a", "string.min_len"),
        ("string a = 1 [(buf.validate.field).required = true];", "{}", "a", "required"),
        (
            "repeated Part parts = 1; message Part { int32 n = 1 [(buf.validate.field).int32.lt = 9]; }",
            '{"parts": [{}, {"n": 9}]}',
            "parts[1].n",
            "int32.lt",
        ),
        (
            "map<string, int32> m = 1 [(buf.validate.field).map.values.int32.lt = 9];",
            '{"m": {"confidential": 9}}',
            "m[…]",
            "int32.lt",
        ),
        (
            'string a = 1; option (buf.validate.message).cel = {id: "a.b", expression: "this.a == \'\'"};',
            '{"a": "x"}',
            "",
            "[a.b]",
        ),
        (
            'int32 a = 1; option (buf.validate.message).cel = {id: "a.b", expression: "1 / this.a > 0"};',
            "{}",
            "",
            "the rule [a.b] cannot be evaluated: EvaluationError",
        ),
        (
            'repeated int32 a = 1 [(buf.validate.field).cel = {id: "a.b", '
            'expression: "this.all(x, this.all(y, this.all(z, x + y + z >= 0)))"}];',
            f'{{"a": {list(range(100))}}}',
            "",
            "the rule [a.b] cannot be evaluated: it takes too many steps",
        ),
    ],
)
def test_a_request_that_breaks_its_rules_is_refused_by_field_and_rule(
    fields: str, request_json: str, field: str, words: str
) -> None:
    method = asking(fields)
    with pytest.raises(InvalidRequest) as caught:
        method.rules.check_request(method.parsed_request(request_json))
    assert caught.value.field == field
    assert words in str(caught.value) and "confidential" not in str(caught.value)


def test_a_request_that_keeps_its_rules_passes() -> None:
    method = asking("string a = 1 [(buf.validate.field).string.email = true];")
    method.rules.check_request(method.parsed_request('{"a": "a@example.com"}'))


@pytest.mark.parametrize(("asked", "answered"), [('{"a": 9}', '{"b": 1}'), ('{"a": 1}', '{"b": 9}')])
def test_an_example_that_breaks_a_rule_is_refused(asked: str, answered: str) -> None:
    rule = "[(buf.validate.field).int32.lt = 9]"
    found = FileDescriptorSet.FromString(
        ruled(f"message Question {{ int32 a = 1 {rule}; }} message Reply {{ int32 b = 1 {rule}; }}")
    )
    options = found.file[-1].service[0].method[0].options.Extensions[service_pb2.model]
    options.examples.add(request_json=asked, response_json=answered)
    with pytest.raises(ConfigError, match=r"acme.v1.Ruled.Ask: option examples: .*\[int32.lt\]"):
        read(found.SerializeToString())


# --- expressions -----


@given(st.integers(-3000, 3000), st.integers(0, 3000))
def test_integers_are_those_of_the_range(least: int, span: int) -> None:
    found = re.compile(integers(least, least + span))
    for number in {least - 1, least, least + span // 2, least + span, least + span + 1, 0, -least}:
        assert bool(found.fullmatch(str(number))) == (least <= number <= least + span)


@given(st.decimals(-50, 50, places=3), st.decimals(0, 20, places=3), st.data())
def test_decimals_are_those_of_the_range(least: Any, span: Any, data: Any) -> None:
    expression = decimals(least, least + span, 2)
    number = data.draw(st.decimals(-60, 60, places=2))
    text = f"{abs(number) if number == 0 else number:.2f}"
    is_in_range = least <= number <= least + span
    is_found = bool(expression) and re.fullmatch(expression, text) is not None
    assert is_found == is_in_range


_ATOMS = ("a", "b", ".", "[ab]", r"\d", "(a|b)", "(?:ab)", "a?", "b*", "a{1,2}", r"[^\da]", "/", "[[]", r"\w+?")


@pytest.mark.filterwarnings("ignore:Possible nested set")
@given(
    st.lists(st.lists(st.sampled_from(_ATOMS), max_size=4), min_size=1, max_size=3),
    st.sets(st.sampled_from(["^", "$"])),
    st.text("ab1/[_ ", max_size=6),
)
def test_a_pattern_matches_where_it_matches_anywhere(branches: list[list[str]], anchors: set[str], text: str) -> None:
    pattern = "|".join(["^" * ("^" in anchors) + "".join(each) + "$" * ("$" in anchors) for each in branches])
    expression = whole_text(pattern, ".*")
    assert (re.fullmatch(expression, text) is not None) == (re.search(pattern, text) is not None)


@pytest.mark.parametrize("pattern", ["(?i)a", r"a\b", "(^a|b)", "a$b", "[a&&b]", r"\Qa", "a\nb", "(a", "[a"])
def test_a_pattern_that_no_expression_of_a_whole_text_says_is_left_to_the_check(pattern: str) -> None:
    assert whole_text(pattern, ".*") == ""
