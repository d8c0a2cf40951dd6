"""Constrained outputs of the embedded model: what completes satisfies, and neighbours see nothing of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest

from photon_grpc import LLM, demo
from photon_grpc.core.ask import Ask, ConstraintAsk, Origin, OutputAsk, SamplingAsk, StopAsk, TextInput
from photon_grpc.core.batch import StepOutput
from photon_grpc.core.request import FinishReason
from photon_grpc.errors import FeatureNotSupported, InvalidConstraint, InvalidRequest, PhotonError
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.output.update import OutputDelta
from photon_grpc.runner.model_runner import MaskedStep
from tests.compose.drawn_constraints import draw
from tests.service.tiny import write_tiny_model

COMPLETE = {FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.CONSTRAINT_COMPLETE}
TOKENIZER = Tokenizer.from_file(demo.DRAFT / "tokenizer.json")
PROMPT = "def value():\n    return "


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(demo.DRAFT, device="cpu", max_num_seqs=64, num_blocks=512, block_size=8) as llm:
        yield llm


@pytest.fixture(scope="module")
def crowded() -> Iterator[LLM]:
    """Prompts in pieces, few blocks, a step in flight: outputs are preempted over and over."""
    with LLM(
        demo.DRAFT, device="cpu", max_num_seqs=8, num_blocks=15, block_size=4, max_num_batched_tokens=5, async_depth=1
    ) as llm:
        yield llm


def asked(number: int, constraint: ConstraintAsk | None, max_tokens: int = 40, **more: Any) -> Ask:
    return Ask(
        input=TextInput(f"{PROMPT}{number} "),
        origin=Origin(time.monotonic()),
        sampling=SamplingAsk(temperature=1.5, seed=number, num_outputs=more.pop("num_outputs", None)),
        stop=StopAsk(max_tokens=max_tokens, **more),
        output=OutputAsk(token_ids=True),
        constraint=constraint,
    )


def answers(llm: LLM, asks: Sequence[Ask]) -> list[OutputDelta]:
    """Return the outputs of all asks, computed in batches."""
    results = llm._program.wait(llm._program.generate(asks, lambda: None))
    return [output for result in results for output in result.outputs]


def reason(output: OutputDelta) -> FinishReason:
    assert output.finish is not None
    return output.finish.reason


def one(llm: LLM, kind: Any, text: str, **more: Any) -> OutputDelta:
    return answers(llm, [asked(1, ConstraintAsk(kind, text), **more)])[0]


def refusal(llm: LLM, kind: Any, text: str = "", **more: Any) -> PhotonError:
    with pytest.raises(PhotonError) as caught:
        answers(llm, [asked(1, ConstraintAsk(kind, text, **more))])
    return caught.value


def test_outputs_that_complete_satisfy_and_neighbours_are_as_alone(llm: LLM, crowded: LLM) -> None:
    random = Random(7)
    drawn = [draw(random) for _ in range(100)]
    asks = [asked(number, constraint) for number, (constraint, _) in enumerate(drawn)]
    plain = [asked(1000 + number, None, max_tokens=30) for number in range(12)]
    mixed = [*asks, *plain]
    Random(8).shuffle(mixed)
    outputs = dict(zip(map(id, mixed), answers(llm, mixed), strict=True))
    num_complete = 0
    for ask, (constraint, satisfies) in zip(asks, drawn, strict=True):
        output = outputs[id(ask)]
        if reason(output) in COMPLETE:
            num_complete += 1
            assert satisfies(output.text), (constraint, output)
        else:
            assert reason(output) is FinishReason.MAX_TOKENS
    assert num_complete > 60
    for number in range(0, 100, 25):
        assert answers(llm, [asks[number]]) == [outputs[id(asks[number])]]
    assert answers(llm, plain[:1]) == [outputs[id(plain[0])]]
    some = [*sorted(asks, key=lambda ask: -len(outputs[id(ask)].token_ids))[:8], plain[0]]
    assert answers(crowded, some) == [outputs[id(ask)] for ask in some]
    assert crowded._program._engine.scheduler.num_preemptions > 0


def test_any_json_object(llm: LLM) -> None:
    outputs = answers(llm, [asked(number, ConstraintAsk("json_object"), max_tokens=60) for number in range(12)])
    texts = [output.text for output in outputs if reason(output) in COMPLETE]
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


def test_an_output_ends_where_only_the_end_may_follow_whatever_else_is_asked(llm: LLM) -> None:
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 30}, {"stop_token_ids": (300,)}):
        output = answers(llm, [asked(1, ConstraintAsk("choices", choices=("maybe", "perhaps")), **more)])[0]
        assert reason(output) is FinishReason.CONSTRAINT_COMPLETE and output.text in ("maybe", "perhaps")


@pytest.mark.parametrize("text", ["<|user|>", "<|eos|>", "a<|eos|>b"])
def test_text_that_spells_a_special_token_is_written_as_text(llm: LLM, text: str) -> None:
    quoted = f'"{text}"'
    expected = {
        ConstraintAsk("choices", choices=(text,)): text,
        ConstraintAsk("regex", re.escape(text)): text,
        ConstraintAsk("json_schema", f'{{"const": {quoted}}}'): quoted,
        ConstraintAsk("json_schema", f'{{"enum": [{quoted}]}}'): quoted,
    }
    outputs = answers(llm, [asked(1, constraint) for constraint in expected])
    assert [output.text for output in outputs] == [*expected.values()]
    assert {reason(output) for output in outputs} == {FinishReason.CONSTRAINT_COMPLETE}


@pytest.mark.parametrize(
    "grammar",
    [
        r'start: "<[5]>" // a <[5]>' + "\n# <[5]>",
        r'start: "\"" "<[5]>" "\"" | /<\/[5]>/',
        'start: a\na: "<" /\\[/ "5]>"',
        'start: %json {"const": "<[5]>"}',
        'root ::= "<[" [5] "]>"',
    ],
)
def test_text_of_a_grammar_may_look_like_a_token(llm: LLM, grammar: str) -> None:
    output = one(llm, "grammar", grammar)
    assert reason(output) is FinishReason.CONSTRAINT_COMPLETE
    assert output.text in ("<[5]>", '"<[5]>"', "</5>")


def test_eos_is_drawn_only_where_the_output_may_end(llm: LLM) -> None:
    threes = ConstraintAsk("regex", "([a-z]{3})+")
    outputs = answers(llm, [asked(number, threes) for number in range(16)])
    ended = [output for output in outputs if reason(output) is FinishReason.EOS]
    assert ended and all(re.fullmatch("([a-z]{3})+", output.text) for output in ended)
    endless = answers(llm, [asked(number, threes, ignore_eos=True, max_tokens=20) for number in range(6)])
    assert {reason(output) for output in endless} == {FinishReason.MAX_TOKENS}
    later = answers(llm, [asked(number, threes, min_tokens=12, max_tokens=16) for number in range(6)])
    assert all(len(output.token_ids) >= 12 for output in later)


def test_stop_tokens_end_an_output_only_where_it_satisfies(llm: LLM) -> None:
    stop = tuple(range(8, 2000))
    asks = [asked(number, ConstraintAsk("regex", "[a-z]{5}[a-z]*"), stop_token_ids=stop) for number in range(12)]
    outputs = answers(llm, asks)
    stopped = [output for output in outputs if reason(output) is FinishReason.STOP_TOKEN]
    assert stopped and all(re.fullmatch("[a-z]{5}[a-z]*", output.text) for output in stopped)


def test_a_stop_string_cuts_an_output(llm: LLM) -> None:
    output = one(llm, "regex", "[ab]{50,}", stop_strings=("ab",), max_tokens=200)
    assert reason(output) is FinishReason.STOP_STRING and "ab" not in output.text


def test_each_of_several_outputs_has_a_matcher_and_the_first_is_the_only_one(llm: LLM) -> None:
    schema = ConstraintAsk("json_schema", '{"type":"array","items":{"type":"integer"},"maxItems":3}')
    outputs = answers(llm, [asked(3, schema, num_outputs=4)])
    assert len({output.text for output in outputs}) > 1
    assert answers(llm, [asked(3, schema)])[0].token_ids == outputs[0].token_ids
    assert all(output.text.endswith("]") for output in outputs if reason(output) in COMPLETE)


def test_a_constrained_output_continues_where_it_was_cut(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    options: dict[str, Any] = {"json_schema": schema, "temperature": 1.5, "seed": 6, "max_tokens": 30}
    whole = llm.generate(PROMPT, **options)[0]
    assert len(whole.token_ids) > 3
    for cut in range(1, len(whole.token_ids)):
        rest = llm.generate(PROMPT, **options, continue_from=whole.token_ids[:cut])[0]
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids
        assert rest.finish_reason is whole.finish_reason


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", '{"properties": {"a/b": {"items": {"not": {}}}}}', 'at /properties/a~1b/items: Unimpl.*"not"'),
        ("json_schema", '{"anyOf": [{"type": "string", "minLength": 3, "maxLength": 2}]}', "Unsatisfiable.*minLength"),
        (
            "json_schema",
            '{"items": {"oneOf": [{"minLength": 1}, {}]}}',
            "at /items: .* must visibly exclude each other",
        ),
        ("json_schema", "false", "Unsatisfiable"),
        ("json_schema", '{"type": "object"', "is not JSON: .*truncated"),
        ("json_schema", "[]", "object, true or false"),
        ("json_schema", '{"type": "number", "minimum": 1e400}', "is not JSON: "),
        ("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}', "nothing satisfies"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "not present"),
        ("json_schema", r'{"const": "a\u0001"}', r"the only control characters that can be written are \\b"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", "[a&&b]", "nothing satisfies"),
        ("regex", "()", "only an empty output"),
        ("grammar", "start: x", 'unknown name: "x"'),
        ("grammar", "start: start", "nothing satisfies"),
        ("grammar", 'root ::= "a', "EBNF"),
        ("grammar", "start: <[5]>", r"line 1: tokens cannot be named: <\[5\]>"),
        ("grammar", "start: <[0-4095]>", "cannot be named"),
        ("grammar", 'start: "<" a\na: /</ "a" <|tool|>', r"line 2: .* <\|tool\|>"),
    ],
)
def test_what_cannot_be_met_is_refused_with_the_reason(llm: LLM, kind: Any, text: str, words: str) -> None:
    error = refusal(llm, kind, text)
    assert isinstance(error, InvalidConstraint)
    assert re.search(words, error.message), error.message
    assert error.field == f"structured_output.{kind}"


def test_a_schema_cannot_change_how_it_is_read(llm: LLM) -> None:
    lenient = '{"x-guidance": {"lenient": true, "whitespace_flexible": true}, "type": "object", "uniqueItems": true}'
    assert "uniqueItems" in refusal(llm, "json_schema", lenient).message


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, r'{"a":1,"\u0061":'),
        ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061":'),
        ({"patternProperties": {"^x": {"type": "integer"}}}, r'{"\u0078a":'),
        ({}, r'{"a":"\u'),
    ],
)
def test_a_key_has_one_spelling(llm: LLM, schema: dict[str, Any], written: str) -> None:
    """By another one a declared property would escape its schema."""
    ids = TOKENIZER.encode(written, add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="continue_from"):
        llm.generate(PROMPT, json_schema={"type": "object", **schema}, continue_from=ids)


def test_text_beyond_ascii_and_short_escapes_are_written(llm: LLM) -> None:
    value = 'é🙂\n\r\b\t\f"\\/'
    (output,) = llm.generate(PROMPT, json_schema={"const": value}, max_tokens=60)
    assert json.loads(output.text) == value and "é🙂" in output.text


def test_too_large_and_empty_constraints_are_refused(llm: LLM) -> None:
    error = refusal(llm, "regex", "a" * (2**20 + 1))
    assert (error.reason, error.needed, error.limit) == ("INVALID_CONSTRAINT", 2**20 + 1, 2**20)
    assert refusal(llm, "regex", "").field == "structured_output.regex"
    assert refusal(llm, "choices").field == "structured_output.choices.values"
    assert refusal(llm, "choices", choices=("a", "")).field == "structured_output.choices.values[1]"
    assert refusal(llm, "grammar", "\ud800").field == "structured_output.grammar"
    with pytest.raises(PhotonError, match="regex is set, too"):
        llm.generate(PROMPT, regex="a", grammar="b")


def test_a_model_without_tokenizer_takes_no_constraint(tmp_path: Any) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    (model / "tokenizer.json").unlink()
    with LLM(model, load_format="dummy", device="cpu", num_blocks=8) as llm:
        assert llm._program._facts.has_grammars is False
        with pytest.raises(FeatureNotSupported, match=r"structured_output\.regex.*no tokenizer"):
            llm.generate([[1, 2]], regex="a")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_masks_lie_as_they_were_given_until_their_step_is_read(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA they travel from where they lie, while the engine goes on."""
    given: dict[MaskedStep, tuple[memoryview, bytes]] = {}
    read: list[bool] = []
    sample, result = MaskedStep.sample, MaskedStep.result

    def sampled(self: MaskedStep, masks: memoryview) -> None:
        given[self] = masks, bytes(masks)
        sample(self, masks)

    def resulted(self: MaskedStep) -> StepOutput:
        if self in given:
            masks, before = given.pop(self)
            read.append(bytes(masks) == before)
        return result(self)

    monkeypatch.setattr(MaskedStep, "sample", sampled)
    monkeypatch.setattr(MaskedStep, "result", resulted)
    with LLM(demo.DRAFT, device="cpu", max_num_seqs=12, num_blocks=200, block_size=4, async_depth=depth) as llm:
        answers(llm, [asked(number, ConstraintAsk("regex", f"[ab]{{{5 + 7 * number},40}}x")) for number in range(6)])
    assert len(read) > 20
    assert all(read)
