"""Text for a terminal, in which nothing controls the terminal."""

from __future__ import annotations

#: Control characters become their pictures, or U+FFFD if there is none; so do the marks that reverse the direction of
#: text. Joiners, which emoji and Persian need, and characters newer than Python's tables stay.
_SHOWN = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
)


def printable(text: str) -> str:
    """Replace control characters by visible ones: a model's text must not control the terminal."""
    return text.translate(_SHOWN)
