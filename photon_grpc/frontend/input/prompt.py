"""The ids of an input, which encoder.py has made off the event loop."""

from __future__ import annotations

from photon_grpc.core.ask import ChatInput, TextInput
from photon_grpc.errors import InvalidTemplate
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.frontend.input.tokenizer import Tokenizer


def encode(
    input: TextInput | ChatInput, tokenizer: Tokenizer | None, template: ChatTemplate | None, max_tokens: int
) -> tuple[int, ...]:
    """Encode a checked input. Raise PromptTooLong over `max_tokens` ids, InvalidRequest, InvalidTemplate."""
    if tokenizer is None:
        raise RuntimeError("text passed the checks although there is no tokenizer")
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
