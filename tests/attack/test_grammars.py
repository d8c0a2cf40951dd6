"""Constraints near their limits: outputs that are continued under a dear schema, and lexers that one output fills."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import grpc

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc
from tests.attack.figures import Figures
from tests.attack.neighbour import neighbour
from tests.attack.size import Size
from tests.attack.victim import Victim

#: An id under it takes the parser 0.7 ms.
DEAR = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {f"property{number}": {"type": "integer"} for number in range(245)},
        "additionalProperties": False,
    },
}
#: One text or two fill a lexer of it.
FORGETFUL = "(?s:.*)[a-{last}](?s:.){{14}}q(?s:.*)"
_NUM_TOKENS = 60
_TIMEOUT_S = 120.0


async def test_ids_to_walk_cost_their_sender_only(attacked: Victim, size: Size, figures: Figures) -> None:
    with attacked.unharmed(), neighbour(attacked.address) as beside:
        async with grpc.aio.insecure_channel(attacked.address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            ids = await _written(stub)
            found = Counter(await asyncio.gather(*(_continued(stub, ids, number) for number in range(size.walks))))
    figures.add("continuations", f"{size.walks} of {len(ids)} ids", found, neighbour=beside.told())
    assert set(found) <= {"OK", "RESOURCE_EXHAUSTED"}
    assert beside.failed == []
    assert max(beside.generate_s) < size.neighbour_s


async def test_what_lexers_learn_from_others_changes_no_output(attacked: Victim, size: Size, figures: Figures) -> None:
    async with grpc.aio.insecure_channel(attacked.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with attacked.unharmed():
            together = await asyncio.gather(*(_drawn(stub, number) for number in range(size.lexers)))
            alone = [await _drawn(stub, number) for number in range(size.lexers)]
    differ = sum(one != other for one, other in zip(together, alone, strict=True))
    figures.add("full lexers", f"{size.lexers} outputs of {_NUM_TOKENS} tokens", f"{differ} differ from alone")
    assert together == alone
    assert any(code == "OK" for code, _ in alone)


async def _written(stub: Any) -> list[int]:
    """An output under the schema that goes on."""
    request = pb.GenerateRequest(text="[", sampling=pb.SamplingParams(temperature=1.0, seed=1))
    request.structured_output.json_schema = json.dumps({**DEAR, "minItems": 60})
    request.stop.max_tokens, request.output.token_ids = 200, True
    return list((await stub.Generate(request, timeout=_TIMEOUT_S)).outputs[0].token_ids)


async def _continued(stub: Any, ids: list[int], number: int) -> str:
    request = pb.GenerateRequest(text="[", continue_from=pb.TokenIds(ids=ids))
    request.structured_output.json_schema = json.dumps({**DEAR, "minItems": 60, "description": f"number {number}"})
    request.stop.max_tokens = len(ids) + 4
    try:
        await stub.Generate(request, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _drawn(stub: Any, number: int) -> tuple[str, str]:
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(temperature=1.0, seed=number))
    request.structured_output.regex = FORGETFUL.format(last="mn"[number % 2])
    request.stop.max_tokens = _NUM_TOKENS
    try:
        answer = await stub.Generate(request, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name), ""
    return "OK", answer.outputs[0].text
