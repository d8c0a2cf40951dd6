"""The work of a request that is done off the event loop (encoder.py): its prompt ids and its stop strings."""

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
    """Prepare a checked input. Raise PromptTooLong over `max_tokens` ids, InvalidRequest, InvalidTemplate."""
    stops = StopStrings(stop_strings) if stop_strings else None
    if isinstance(input, IdsInput):
        return Prepared(input.token_ids, stops)
    if tokenizer is None:
        raise RuntimeError("text passed the checks although there is no tokenizer")
    return Prepared(encode(input, tokenizer, template, max_tokens), stops)


def encode(
    input: TextInput | ChatInput, tokenizer: Tokenizer, template: ChatTemplate | None, max_tokens: int
) -> tuple[int, ...]:
    """Return the ids that Generate sees. Raise the same errors as `prepare`."""
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
    unescaped = template.variables(input, max_bytes=limit, max_tokens=max_tokens)
    variables, escaper = template.escape(unescaped, tokenizer.escaper)
    # An escaped character takes up to four bytes instead of one.
    try:
        text = template.render(variables, max_bytes=limit and 4 * limit, max_tokens=max_tokens)
    except InvalidTemplate as error:  # a template may quote what it refuses
        raise InvalidTemplate(escaper.unescape(error.message), field=error.field) from None
    return tokenizer.encode_template(text, escaper, max_tokens=max_tokens)
