"""docs/numerics.md knows every flag: it may change bits, or it does not, or it is of connections and logs."""

from __future__ import annotations

import re
from pathlib import Path

from photon_grpc.config.settings import settings
from photon_grpc.runner.numerics import NUMERICS

PAGE = (Path(__file__).parents[2] / "docs/numerics.md").read_text(encoding="utf-8")
#: Of the sections that an engine is made of; they name a model, bound its queue or write what it did.
BESIDE = {"--served-model-name", "--max-queue-size", "--max-queued-tokens", "--step-trace"}


def test_the_list_of_flags_that_may_change_bits_is_closed() -> None:
    unchanged, changing = PAGE.split("none of these flags changes a bit", 1)[1].split("the list is closed", 1)
    neither = set(re.findall(r"--[a-z-]+", unchanged))
    may = set(re.findall(r"^\| (`--.*?) \|", changing.split("**`--numerics fast`**")[0], re.MULTILINE))
    may = set(re.findall(r"--[a-z-]+", " ".join(may)))
    flags = {"--" + each.name.replace("_", "-") for each in settings() if each.section != "server"}
    assert neither & may == {"--block-size", "--max-model-len"}
    assert neither | may | BESIDE == flags | {"--frontends"}


def test_the_page_shows_the_number_of_now() -> None:
    assert f"| `number` | {NUMERICS} |" in PAGE
