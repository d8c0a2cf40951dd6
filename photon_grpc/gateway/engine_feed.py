"""The live picture of the engine as JSON, for the page."""

from __future__ import annotations

import msgspec

from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.frames import Facts


def picture_json(picture: EnginePicture, facts: Facts) -> bytes:
    """Return one JSON object without line breaks; steps and lanes are arrays in the order of their class's fields."""
    load = picture.load
    return msgspec.json.encode(
        {
            "time_s": picture.time_s,
            "num_slots": facts.max_num_seqs,
            "num_blocks": facts.num_blocks,
            "block_size": facts.kv.block_size,
            "device": facts.device,
            "steps": picture.steps,
            "num_steps": picture.num_steps,
            "lanes": picture.lanes,
            "queued": load.queued,
            "blocks": {
                "owned": load.owned_blocks,
                "cached": load.cached_blocks,
                "limbo": load.limbo_blocks,
                "free": load.free_blocks,
            },
            "output_tokens_per_s": round(load.output_tokens_per_s, 1),
            "prompt_tokens_per_s": round(load.prompt_tokens_per_s, 1),
        }
    )
