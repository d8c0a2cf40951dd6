"""What callers are told of the model follows from the settings, before an engine is there to say it."""

from __future__ import annotations

import pytest

from photon_grpc.compose.served_model import read_served_model
from photon_grpc.config.flags import CacheConfig, SchedulerConfig, ServeConfig
from photon_grpc.core.request import Request, SamplingParams, StopParams
from photon_grpc.engine.scheduler.policy import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_priorities_are_offered_under_the_policies_whose_order_they_change(policy: str) -> None:
    low, high = (
        Request("r", (1,), SamplingParams(), StopParams(1), 100.0, priority=priority, deadline_s=200.0)
        for priority in (0, 5)
    )
    changes = POLICIES[policy]().rank(high) != POLICIES[policy]().rank(low)
    model = read_served_model(ServeConfig(scheduler=SchedulerConfig(scheduling_policy=policy)))
    assert ("PRIORITY" in model.facts(None).features) == changes


@pytest.mark.parametrize(
    ("cache", "shares"),
    [
        (CacheConfig(), True),
        (CacheConfig(enable_prefix_caching=False), False),
        (CacheConfig(kv_layout="contiguous"), False),
    ],
)
def test_shared_prefixes_are_offered_where_there_are_some(cache: CacheConfig, shares: bool) -> None:
    assert ("PREFIX_CACHE" in read_served_model(ServeConfig(cache=cache)).facts(None).features) == shares
