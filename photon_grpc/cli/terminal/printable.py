"""Text on its way to a terminal: shown as it is, but for what would steer the terminal."""

from __future__ import annotations

#: Control characters become their pictures, or U+FFFD where there is none; so do the marks that turn text around for
#: the rest of a line. Joiners, which emoji and Persian are written with, and characters younger than Python's tables
#: stay.
_SHOWN = (
    {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
)


def printable(text: str) -> str:
    """Show control characters instead of sending them: a model's text must not steer the terminal."""
    return text.translate(_SHOWN)
