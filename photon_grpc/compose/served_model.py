"""The model that a front end serves, and its names, read without torch."""

from __future__ import annotations

from dataclasses import replace

from photon_grpc import demo
from photon_grpc.config.flags import ServeConfig
from photon_grpc.config.model_dir import read_model_dir
from photon_grpc.engine.scheduler.policy import POLICIES
from photon_grpc.frontend.model import ServedModel

#: The embedded model's name, instead of that of its directory.
DEMO_NAME = "photon-demo"


def read_served_model(config: ServeConfig) -> ServedModel:
    """Read the model directory. Raise ModelLoadError naming the faulty file."""
    model = config.model
    names = model.served_model_name or (() if model.model else (DEMO_NAME,))
    model_config = read_model_dir(model.model or demo.TARGET)
    served = ServedModel.from_config(
        model_config,
        names,
        max_model_len=model.max_model_len,
        max_message_bytes=config.server.max_message_size,
        shares_prefixes=config.cache.shares_prefixes,
        obeys_priority=POLICIES[config.scheduler.scheduling_policy].obeys_priority,
    )
    return replace(served, expert_shares=config.parallel.expert_parallel_size)
