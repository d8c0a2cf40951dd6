"""Whether a stream that continues elsewhere has the bits that its first server would have given.

A call that resumes a stream tells its reader by another `start`, which a whole stream does not have: the reader
keeps the first one and notes that the stream is not bit-exact.
"""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)

#: Servers with this mode promise no bits, not even to themselves (docs/numerics.md).
_FAST = "fast-"


def is_bit_exact(before: str, after: str) -> bool:
    """Compare the numerics versions of an interrupted stream and of its continuation. All clients have this rule.

    An older server sends none, and promises nothing.
    """
    return before == after != "" and not after.startswith(_FAST)


def tell(request_id: str, before: str, after: str) -> None:
    """Log that a continuation is not bit-exact."""
    _LOG.warning(
        "request %s was continued by a server with other numerics (%s, before %s): "
        "its ids may differ from those of one server",
        request_id,
        after or "unknown",
        before or "unknown",
    )
