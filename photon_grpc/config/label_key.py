"""The rule for the keys of labels, which callers give to requests and operators name for metrics."""

from __future__ import annotations

import re

LABEL_KEY = re.compile(r"[a-z][a-z0-9_]{0,62}")
LABEL_KEY_RULE = "1 to 63 of a-z, 0-9 and _, beginning with a letter"
#: Labels of a request, and keys that metrics may count by.
MAX_LABELS = 16
