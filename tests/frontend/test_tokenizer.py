"""Encoding against transformers and the tokenizers library as they are."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from photon_grpc.errors import InvalidRequest, ModelLoadError, PromptTooLong
from photon_grpc.frontend.input.markers import SpecialTokenEscaper
from photon_grpc.frontend.input.tokenizer import Tokenizer
from tests.frontend.small_tokenizers import KINDS, definition

INNOCENT = [
    "Hello world",
    " leading and trailing ",
    "def fib(n):\n\treturn n\n\n\n  pass",
    "naïve café Ωmega 日本語 🙂 é",
    "a < b > c | d <| x |> [y]",
    "zalgo h̸̡̪̯ͨ͊̽̅̾e̡l̢̨̛",
    "<think>ordinary added token</think>",
]


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("text", INNOCENT)
@pytest.mark.parametrize("add", [True, False])
def test_plain_text_is_encoded_as_transformers_does(kind: str, text: str, add: bool) -> None:
    ours = Tokenizer(definition(kind))
    reference = PreTrainedTokenizerFast(tokenizer_object=Reference.from_str(definition(kind)))
    assert list(ours.encode(text, add_special_tokens=add)) == reference(text, add_special_tokens=add)["input_ids"]


def test_parsing_special_tokens_is_what_transformers_does(kind: str) -> None:
    ours = Tokenizer(definition(kind))
    reference = PreTrainedTokenizerFast(tokenizer_object=Reference.from_str(definition(kind)))
    for special in ours.markers.texts:
        text = f"a {special} b{special}c  {special}\n{special}"
        ids = ours.encode(text, parse_special_tokens=True)
        assert list(ids) == reference(text)["input_ids"]
        assert reference.convert_tokens_to_ids(special) in ids


def test_a_text_that_begins_with_what_is_added_before_it_gets_no_second_one(kind: str) -> None:
    ours = Tokenizer(definition(kind))
    reference = PreTrainedTokenizerFast(tokenizer_object=Reference.from_str(definition(kind)))
    added = reference("x")["input_ids"][0]
    for special in ours.markers.texts:
        text = f"{special}x {special}"
        ids = reference(text)["input_ids"]
        doubled = int(added == reference.convert_tokens_to_ids(special))
        assert list(ours.encode(text, parse_special_tokens=True)) == ids[doubled:]
        assert list(ours.encode(text, parse_special_tokens=True, max_tokens=len(ids) - doubled)) == ids[doubled:]
        with pytest.raises(PromptTooLong, match=f"{len(ids) - doubled} tokens"):
            ours.encode(text, parse_special_tokens=True, max_tokens=len(ids) - doubled - 1)
        without = ours.encode(text, parse_special_tokens=True, add_special_tokens=False)
        assert list(without) == reference(text, add_special_tokens=False)["input_ids"]


def with_template(single: str, *, single_word: bool = False) -> Tokenizer:
    """Return a tokenizer that puts `single` around a text; <s> and </s> are its special tokens."""
    tokenizer = Reference.from_str(definition("llama2_like"))
    special = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["single_word"] = single_word
    return Tokenizer(json.dumps(spec))


def test_a_token_between_bos_and_the_text_stays() -> None:
    ours = with_template("<s> </s> $A")
    spelled = ours.encode("<s>x", parse_special_tokens=True)
    assert (
        spelled[:3] == (1, 2, 1)
        and spelled[3:] == ours.encode("<s>x", parse_special_tokens=True, add_special_tokens=False)[1:]
    )


def test_a_spelling_that_is_no_token_leaves_bos() -> None:
    ours = with_template("<s> $A", single_word=True)
    ids = ours.encode("<s>x", parse_special_tokens=True)
    assert ids.count(1) == 1 and ids[0] == 1 and len(ids) > 2
    assert ours.encode("<s> x", parse_special_tokens=True).count(1) == 1


def test_an_empty_text_keeps_what_is_around_it() -> None:
    ours = with_template("<s> $A <s>")
    assert ours.encode("", parse_special_tokens=True) == (1, 1)
    assert ours.encode("<s>", parse_special_tokens=True) == (1, 1)


def test_special_tokens_spelled_out_in_text_stay_text(kind: str) -> None:
    ours = Tokenizer(definition(kind))
    reference = Reference.from_str(definition(kind))
    unknown = {reference.token_to_id(text) for text in ("<unk>", "[UNK]")}
    for special in ours.markers.texts:
        for text in (special, f"a{special}b", f" {special} {special}{special}", f"<{special}>"):
            ids = ours.encode(text, add_special_tokens=False)
            assert not (ours.special_ids - unknown) & set(ids), text
            if kind not in ("wordpiece", "metaspace_unigram"):  # which lose characters they do not know
                assert (
                    ours.decode(ids)
                    == reference.normalizer.normalize_str(text).replace("▁", " ")[kind == "llama2_like" :]
                    if (reference.normalizer)
                    else text
                )


def test_ordinary_added_tokens_keep_their_ids() -> None:
    ours = Tokenizer(definition("qwen_like"))
    reference = Reference.from_str(definition("qwen_like"))
    assert ours.encode("<tool_call>") == (reference.token_to_id("<tool_call>"),)


def test_template_text_marks_special_tokens_and_escaped_ones_stay_text() -> None:
    for kind in ("byte_level", "qwen_like", "llama2_like", "metaspace_unigram"):
        ours = Tokenizer(definition(kind))
        reference = Reference.from_str(definition(kind))
        special = ours.markers.texts[0]
        escaper = SpecialTokenEscaper(ours.markers, [f"x {special} y"])
        text = f"{special}user\n{escaper.escape(f'x {special} y')}  {special}\nok"
        ids = ours.encode_template(text, escaper)
        assert ids.count(reference.token_to_id(special)) == 2
        # The escaped spelling in the middle gets the ids of a tokenizer that does not know the special token.
        innocent = SpecialTokenEscaper(ours.markers, [])
        same = f"{special}user\nx y  {special}\nok"
        assert list(ours.encode_template(same, innocent)) == reference.encode(same, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "attack",
    ["<|im_end|>", "<|IM_end|>", "a<|im_", "|im_end|>b", "<", "|>", ">", "<|im_end|", " <|im_end|>\n<|im_start|>"],
)
def test_escaping_breaks_spellings_and_is_undone(attack: str) -> None:
    ours = Tokenizer(definition("qwen_like"))
    escaper = SpecialTokenEscaper(ours.markers, [attack])
    escaped = escaper.escape(attack)
    assert len(escaped) == len(attack)
    assert escaper.unescape(escaped) == attack
    for before in ("", "<", "<|im_", "<|im_end|"):
        for after in ("", ">", "|>", "end|>", "|im_end|>"):
            text = (before + escaped.strip().lower() + after) if before or after else escaped
            if not any(special in before + after for special in ours.markers.texts):
                assert not any(special in text for special in ours.markers.texts), (before, after)


def test_what_cannot_fit_is_refused_without_encoding() -> None:
    ours = Tokenizer(definition("byte_level"))
    limit = ours.max_bytes(100)
    assert limit is not None
    with pytest.raises(PromptTooLong) as caught:
        ours.encode("a" * (limit + 1), max_tokens=100)
    assert caught.value.limit == 100
    assert (caught.value.needed or 0) > 100
    with pytest.raises(PromptTooLong) as caught:
        ours.encode("a\n" * 100, max_tokens=100)
    assert caught.value.needed == 201
    assert len(ours.encode("a\n" * 50, add_special_tokens=False, max_tokens=100)) == 100


def test_the_bound_is_never_below_what_fits(kind: str) -> None:
    ours = Tokenizer(definition(kind))
    limit = ours.max_bytes(1)
    reference = Reference.from_str(definition(kind))
    if limit is None:
        return
    for text in [*INNOCENT, "<|start_header_id|>" * 20, " " * 200, "a" * 500]:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert len(text.encode()) <= limit * len(ids)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        Tokenizer(definition("byte_level")).encode("a\ud800b")
    assert caught.value.field == "text"


def test_broken_definitions_are_named() -> None:
    for content in ("", "{}", "[]", '{"model": 3}', "\x00"):
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
            Tokenizer(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer(b"\xff\xfe")


def test_truncation_and_padding_of_the_file_are_off() -> None:
    spec = json.loads(definition("byte_level"))
    spec["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    spec["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    assert Tokenizer(json.dumps(spec)).encode(INNOCENT[2]) == Tokenizer(definition("byte_level")).encode(INNOCENT[2])


def test_named_tokens_become_special() -> None:
    spec = json.loads(definition("llama2_like"))
    spec["added_tokens"] = []
    ours = Tokenizer(json.dumps(spec), {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<absent>"})
    assert ours.special_ids == {1, 2}
    assert 2 not in ours.encode("a</s>b")
    assert 2 in ours.encode("a</s>b", parse_special_tokens=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_librarys_cache_of_words_is_bounded_and_changes_no_ids() -> None:
    """The library keeps 10,000 words of at most 255 bytes for each tokenizer and never evicts one."""
    tokenizer = Tokenizer(definition("byte_level"))
    text = "def fib(n): return n"
    ids = tokenizer.encode(text)

    def encode_words(first: int) -> None:
        for at in range(first, first + 12_000, 100):
            tokenizer.encode(" ".join([f"{word:0100d}" for word in range(at, at + 100)]))

    encode_words(0)
    before = resident_bytes()
    encode_words(12_000)
    assert resident_bytes() - before < 4 * 2**20
    assert tokenizer.encode(text) == ids


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
