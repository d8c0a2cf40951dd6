"""The parts of an answer: what a template defines, and what a text holds."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from msgspec.structs import replace

from photon_grpc.core.ask import ChatInput, ChatMessage
from photon_grpc.core.call_form import BARE, LISTED, TAGGED
from photon_grpc.core.generation import ToolCall
from photon_grpc.frontend.output.answer import PLAIN, Answer, AnswerFormat, AnswerParser, joined_answer
from photon_grpc.frontend.output.call_ids import CallIds
from photon_grpc.frontend.output.tool_calls import MAX_CALL_CHARS, MAX_CALL_DEPTH
from tests.frontend import test_chat
from tests.frontend.answer_templates import DEEPSEEK, LLAMA3, QWEN3

QWEN = AnswerFormat.of(QWEN3)
LLAMA = AnswerFormat.of(LLAMA3)
CHAT = ChatInput((ChatMessage("user", "hi"),))
WITH_TOOLS = ChatInput((ChatMessage("user", "hi"),), tools_json='[{"name": "f"}]')
IDS = CallIds("r", 0, 1)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parts(text: str, format: AnswerFormat = QWEN, chat: ChatInput = WITH_TOOLS, end: str = "", cut: int = 0) -> Answer:
    """Return the parts of `text`, pushed in pieces of `cut` characters (0: at once)."""
    parser = format.parser(chat, end, IDS)
    borders = [0, *(range(cut, len(text), cut) if cut else ()), len(text)]
    told = [released(parser, text[a:b]) for a, b in pairwise(borders)]
    return joined_answer([*told, parser.take(is_over=True), parser.take(is_over=True)])


def released(parser: AnswerParser, text: str) -> Answer:
    parser.push(text)
    return parser.take(is_over=False)


def calls(*wanted: tuple[str, str]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(index, name, arguments, IDS.of(index)) for index, (name, arguments) in enumerate(wanted))


# --- what a template defines -----------------------------------------------------------------------------------------


def test_marks_are_found_in_the_template() -> None:
    assert AnswerFormat.of(QWEN3) == AnswerFormat(has_reasoning=True, calls=TAGGED)
    assert AnswerFormat.of(DEEPSEEK) == AnswerFormat(has_reasoning=True)
    assert AnswerFormat.of(LLAMA3) == AnswerFormat(calls=BARE)
    assert AnswerFormat.of(test_chat.LLAMA3) == PLAIN


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("<tool_call>{'name': ..., 'arguments': {{ tool_call.arguments | tojson }}}</tool_call>", TAGGED),
        ("<tool_call>\n<function=f>\n<parameter=a>\n</function>\n</tool_call>{{ call.arguments }}", None),
        ("<tool_call>{'arguments': 1}", None),
        ("{{ tool.function.name }} {{ tool.function.parameters | tojson }}", None),
        ('{{- "[TOOL_CALLS] [" }}{{ call.function | tojson }}{{- "]" }}', LISTED),
        ('{{- "[TOOL_CALLS]" + call.function.name + "[ARGS]" }}', None),
        (r'{{ "{\"name\": function name, \"parameters\": its values}" }}', BARE),
    ],
)
def test_calls_in_another_syntax_are_not_read(template: str, calls: object) -> None:
    assert AnswerFormat.of(template).calls is calls


def test_marks_that_enclose_no_text_are_ignored() -> None:
    assert AnswerFormat.of(QWEN3, ("<think>", "</think>")) == AnswerFormat(calls=TAGGED)
    assert AnswerFormat.of(QWEN3, ("</tool_call>", "<|im_end|>")) == AnswerFormat(has_reasoning=True)


# --- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(12))
@pytest.mark.parametrize(
    ("text", "end", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "", "\nhm\n", "\n\nyes"),
        (" \n<think>hm</think>yes", "", "hm", "yes"),
        ("hm</think>yes", "<|assistant|><think>\n", "hm", "yes"),
        ("hm </thin> </ </think>yes", "<think>", "hm </thin> </ ", "yes"),
        ("no end", "<think>", "no end", ""),
        ("<think>no end</thi", "", "no end</thi", ""),
        ("yes", "<think>\n\n</think>\n\n", "", "yes"),
        ("say <think>x</think>", "", "", "say <think>x</think>"),
        ("<think>a</think>b<think>c</think>", "", "a", "b<think>c</think>"),
        ("<thi", "", "", "<thi"),
        (" <thinner>", "", "", " <thinner>"),
        (" " * 65 + "<think>a</think>", "", "", " " * 65 + "<think>a</think>"),
        (" \n", "", "", " \n"),
        ("", "", "", ""),
        ("日本</think>🙂", "<think>", "日本", "🙂"),
        (f"{CALL}</think>{CALL}", "<think>", CALL, ""),
    ],
)
def test_reasoning_stands_at_the_beginning(text: str, end: str, reasoning: str, content: str, cut: int) -> None:
    answer = parts(text, end=end, cut=cut)
    assert (answer.reasoning, answer.content) == (reasoning, content)


def test_reasoning_and_content_stream() -> None:
    parser = QWEN.parser(CHAT, "<think>\n", IDS)
    told = [released(parser, piece) for piece in ("I ", "see", "</", "x", "</think", ">", "So", " <tool_call>")]
    assert [(each.reasoning, each.content) for each in told] == [
        ("I ", ""),
        ("see", ""),
        ("", ""),
        ("</x", ""),
        ("", ""),
        ("", ""),
        ("", "So"),
        ("", " <tool_call>"),
    ], "without tools nothing is a call"


def test_a_format_without_reasoning_has_none() -> None:
    assert parts("<think>a</think>b", LLAMA) == Answer("", "<think>a</think>b")


# --- calls -----------------------------------------------------------------------------------------------------------

TRICKY = '{"a": "}{</tool_call>\\"<tool_call>\\\\", "b": [{"c": {}}, "日本 🙂 \\u00e9"]}'
WELL_FORMED = [
    (CALL, "", calls(("f", '{"a": 1}'))),
    (f"Let me see. {CALL} Done.", "Let me see.  Done.", calls(("f", '{"a": 1}'))),
    (f"{CALL}\n{CALL}{CALL}", "\n", calls(*[("f", '{"a": 1}')] * 3)),
    ('<tool_call>{"arguments":{},"name":"f"}</tool_call>', "", calls(("f", "{}"))),
    (f'<tool_call> {{"name": "naïve.f", "arguments": {TRICKY}}}</tool_call>', "", calls(("naïve.f", TRICKY))),
    ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", calls(("f", '{"a": 1}'))),
    # An output that ends with the object, or within the mark after it.
    ('<tool_call>{"name": "f", "arguments": {}}', "", calls(("f", "{}"))),
    ('<tool_call>{"name": "f", "arguments": {}} \n</tool', "", calls(("f", "{}"))),
    ("<tool_call>" * 3 + CALL, "<tool_call>" * 3, calls(("f", '{"a": 1}'))),
]
ENTRY = '{"name": "f", "arguments": {"a": [1, {}]}, "id": "abcdefghi"}'
ENTRY_CALL = ("f", '{"a": [1, {}]}')


@pytest.mark.parametrize("cut", range(9))
@pytest.mark.parametrize(
    ("text", "content", "wanted"),
    [
        (f"[{ENTRY}]", "", [ENTRY_CALL]),
        (f" \n[ {ENTRY} ,\n{ENTRY} ] ", " ", [ENTRY_CALL] * 2),
        (f"[TOOL_CALLS] [{ENTRY}]", "", [ENTRY_CALL]),
        (f"See: [TOOL_CALLS][{ENTRY}, {ENTRY}] done", "See:  done", [ENTRY_CALL] * 2),
        # An output that ends within the list.
        (f"[{ENTRY}", "", [ENTRY_CALL]),
        (f"[{ENTRY}, {ENTRY[:-1]}", f", {ENTRY[:-1]}", [ENTRY_CALL]),
        # No calls.
        ("[1, 2]", "[1, 2]", []),
        ("[]", "[]", []),
        ("The list [TOOL", "The list [TOOL", []),
        (ENTRY, ENTRY, []),
        (f"[{ENTRY}; {ENTRY}]", f"; {ENTRY}]", [ENTRY_CALL]),
        ('[{"name": "f"}]', '[{"name": "f"}]', []),
    ],
)
def test_calls_of_a_list(text: str, content: str, wanted: list[tuple[str, str]], cut: int) -> None:
    answer = parts(text, AnswerFormat(calls=LISTED), cut=cut)
    assert (answer.content, answer.tool_calls) == (content, calls(*wanted))


MALFORMED = [
    "<tool_call>",
    "<tool_call>  ",
    "<tool_call>f(1)</tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": "f"}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
    "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "no end}}\n</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1}',
    '<tool_call>{"name": "f", "arguments": {"a": "',
    '<tool_call>{"name": "f", "arguments": {}} or not</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}]</tool_call>',
    '<tool_call>{"name": "f", "arguments": ' + '{"a":' * MAX_CALL_DEPTH + "1" + "}" * MAX_CALL_DEPTH + "}</tool_call>",
    '{"name": "f", "arguments": {}}</tool_call>',
]


@pytest.mark.parametrize("cut", [0, 1, 2, 7, 11])
@pytest.mark.parametrize(("text", "content", "found"), WELL_FORMED)
def test_tagged_calls(text: str, content: str, found: tuple[ToolCall, ...], cut: int) -> None:
    assert parts(text, cut=cut) == Answer("", content, found)


@pytest.mark.parametrize("cut", [0, 1, 5])
@pytest.mark.parametrize("text", MALFORMED)
def test_text_that_is_not_a_call_is_content_and_hides_no_later_call(text: str, cut: int) -> None:
    assert parts(text, cut=cut) == Answer("", text)
    if not text.endswith('"'):  # an open string hides what follows
        assert parts(text + CALL, cut=cut) == Answer("", text, calls(("f", '{"a": 1}')))


@pytest.mark.parametrize("cut", [0, 1, 2, 7])
@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ('{"name": "f", "parameters": {"a": {"b": "}"}}}', "", calls(("f", '{"a": {"b": "}"}}'))),
        ('\n{"type": "function", "name": "f", "parameters": {}}\n', "\n", calls(("f", "{}"))),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", calls(("f", "{}"))),
        ('I call <|python_tag|>{"name": "f", "parameters": {}}', "I call ", calls(("f", "{}"))),
        (
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}\nwell',
            "\nwell",
            calls(("f", "{}"), ("g", "{}")),
        ),
        ('Sure: {"name": "f", "parameters": {}}', 'Sure: {"name": "f", "parameters": {}}', ()),
        ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', ()),
        ('{"name": "f", "parameters": {}', '{"name": "f", "parameters": {}', ()),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", ()),
        ("; <|pyth", "; <|pyth", ()),
    ],
)
def test_bare_calls(text: str, content: str, found: tuple[ToolCall, ...], cut: int) -> None:
    assert parts(text, LLAMA, cut=cut) == Answer("", content, found)


def test_without_tools_nothing_is_a_call() -> None:
    assert parts(CALL, chat=CHAT) == Answer("", CALL)
    assert parts(CALL, chat=replace(CHAT, tools_json=" [ ]")) == Answer("", CALL)
    assert parts('{"name": "f", "parameters": {}}', LLAMA, CHAT).tool_calls == ()


def test_a_call_comes_when_it_is_complete_and_what_is_before_it_at_once() -> None:
    parser = QWEN.parser(WITH_TOOLS, "", IDS)
    told = [released(parser, piece) for piece in ("Now <tool", "_call>\n{", '"name": "f", "arguments": {}}', "\n")]
    assert [each.content for each in told] == ["Now ", "", "", ""]
    assert not any(each.tool_calls for each in told)
    assert released(parser, "</tool_call>.") == Answer("", ".", calls(("f", "{}")))


@pytest.mark.parametrize("cut", [0, 1000, 4099])
@pytest.mark.parametrize("more", [0, 1])
def test_a_call_is_bounded(more: int, cut: int) -> None:
    frame = '<tool_call>{"name": "f", "arguments": {"a": ""}}'
    argument = "x" * (MAX_CALL_CHARS - len(frame) + more)
    text = frame.replace('""', json.dumps(argument)) + "</tool_call>" + CALL
    answer = parts(text, cut=cut)
    first = ((frame[len("<tool_call>") :], "f"),) if not more else ()
    assert len(answer.tool_calls) == len(first) + 1
    assert answer.content == ("" if first else text[: -len(CALL)])
    assert answer.tool_calls[-1].arguments_json == '{"a": 1}'


@pytest.mark.parametrize("piece", ["<tool_call>", '<tool_call>{"', "<tool_call>{", " ", "{", '<tool_call>"', "<"])
def test_endless_repetition_is_scanned_only_once(piece: str) -> None:
    text = piece * (2**18 // len(piece))
    for format, cut in ((QWEN, 0), (QWEN, 4096), (LLAMA, 0)):
        answer = parts(text, format, cut=cut)
        assert (answer.content, answer.tool_calls) == (text, ())
