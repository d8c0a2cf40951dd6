"""What cannot be put together is said in a sentence about the flag, not in a stack."""

from __future__ import annotations

import pytest

from photon_grpc.compose.assemble import assemble
from photon_grpc.config.resolve import resolve
from photon_grpc.errors import ConfigError


def test_blocks_that_no_memory_holds_are_refused_by_flag() -> None:
    config = resolve({"num_blocks": str(10**12)}, {}).config
    with pytest.raises(ConfigError, match=f"{10**12} KV blocks of 16 tokens .* --num-blocks"):
        assemble(config, lambda stage, done, total: None)
