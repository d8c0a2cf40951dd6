"""An input's ids, and what else takes long: the work of a request that is done off the event loop (encoder.py)."""

from __future__ import annotations

from dataclasses import dataclass

from photon_grpc.core.ask import ChatInput, IdsInput, TextInput
from photon_grpc.errors import InvalidTemplate
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.output.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Prepared:
    prompt_ids: tuple[int, ...]
    stops: StopStrings | None


def prepare(
    input: TextInput | IdsInput | ChatInput,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    stop_strings: tuple[str, ...],
    max_tokens: int,
) -> Prepared:
    """For a checked input. Raise PromptTooLong where it can only give more than `max_tokens` ids, InvalidRequest,
    InvalidTemplate."""
    stops = StopStrings(stop_strings) if stop_strings else None
    if isinstance(input, IdsInput):
        return Prepared(input.token_ids, stops)
    if tokenizer is None:
        raise RuntimeError("text was let through though there is no tokenizer")
    return Prepared(encode(input, tokenizer, template, max_tokens), stops)


def encode(
    input: TextInput | ChatInput, tokenizer: Tokenizer, template: ChatTemplate | None, max_tokens: int
) -> tuple[int, ...]:
    """Return the ids that Generate sees. Raise as `prepare`."""
    if isinstance(input, TextInput):
        return tokenizer.encode(
            input.text,
            add_special_tokens=input.add_special_tokens,
            parse_special_tokens=input.parse_special_tokens,
            max_tokens=max_tokens,
        )
    if template is None:
        raise InvalidTemplate("there is no chat template", field="chat")
    limit = tokenizer.max_bytes(max_tokens)
    given = template.variables(input, max_bytes=limit, max_tokens=max_tokens)
    variables, disguise = template.disguised(given, tokenizer.disguise)
    # A disguised character takes up to four bytes in place of one.
    try:
        text = template.render(variables, max_bytes=limit and 4 * limit, max_tokens=max_tokens)
    except InvalidTemplate as error:  # a template quotes what it refuses
        raise InvalidTemplate(disguise.take_off(error.message), field=error.field) from None
    return tokenizer.encode_template(text, disguise, max_tokens=max_tokens)
