"""Words for what keeps a text from being JSON."""

from __future__ import annotations

#: msgspec says "truncated" of a text that ends, and of half a pair as the last six characters before a text's end.
_ENDS = "Input data was truncated"
_MAX_LENGTH = 200


def json_fault(error: Exception) -> str:
    """Describe a failure of msgspec's decoder, without paths and names that only it knows."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} of a text is not UTF-8"
    if isinstance(error, UnicodeEncodeError):
        return f"character {error.start} is half of a surrogate pair"
    text = str(error).partition(" - at `")[0].removeprefix("JSON is malformed: ")
    if text == _ENDS:
        return "it is truncated, or ends with half of a surrogate pair"
    return text[:1].lower() + text[1:_MAX_LENGTH]
