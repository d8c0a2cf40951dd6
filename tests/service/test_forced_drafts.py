"""Over gRPC: text that a constraint leaves no choice about is drafted, and the answer is the one without drafts."""

from __future__ import annotations

import json

from photon_grpc.v1 import inference_pb2
from tests.service.running import client, serving

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "customer_name": {"type": "string", "maxLength": 8},
            "quantity_ordered": {"type": "integer", "minimum": 0, "maximum": 99},
            "is_delivered": {"type": "boolean"},
        },
        "required": ["customer_name", "quantity_ordered", "is_delivered"],
        "additionalProperties": False,
    }
)


def request(speculation: int | None = None) -> inference_pb2.GenerateRequest:
    asked = inference_pb2.GenerateRequest(text="order = ")
    asked.structured_output.json_schema = SCHEMA
    asked.sampling.temperature, asked.sampling.seed, asked.sampling.num_outputs = 0.8, 3, 2
    asked.stop.max_tokens, asked.output.logprobs, asked.output.token_ids = 60, 1, True
    if speculation is not None:
        asked.scheduling.speculation = speculation
    return asked


def test_keys_of_an_object_are_drafted_and_change_nothing() -> None:
    flags = ("--device", "cpu", "--max-num-seqs", "4", "--num-blocks", "256", "--speculative-model", "grammar")
    with serving(*flags, "--speculation-control", "fixed") as service, client(service.wait_ready()[0]) as call:
        plain, drafting = (call.inference.Generate(request(most), timeout=60) for most in (0, None))
    assert [output.token_ids for output in drafting.outputs] == [output.token_ids for output in plain.outputs]
    assert [json.loads(output.text)["is_delivered"] for output in drafting.outputs]
    assert not plain.usage.draft_tokens
    # Without a choice the mask leaves the model just the drafts.
    usage = drafting.usage
    assert 24 <= usage.accepted_draft_tokens == usage.draft_tokens < usage.output_tokens
