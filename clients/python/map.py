"""A list of prompts, many at a time over one connection: results in order or as they end. A full server is waited for.

python clients/python/map.py [TARGET]
"""

import asyncio
import sys

from photon_grpc.client import Client
from photon_grpc.errors import PhotonError

PROMPTS = ["import os\n", "def main():", "class Node:", "for i in range(", "try:\n", "with open(", "return sorted("]


async def main(target: str) -> None:
    async with Client(target) as client:
        results = client.map(PROMPTS, concurrency=4, max_tokens=16, temperature=0)
        for prompt in PROMPTS:
            print(f"{prompt!r} -> {(await anext(results)).text!r}")
        async for index, result in client.map_unordered(PROMPTS, concurrency=4, max_tokens=16, temperature=0):
            print(f"{index}: {result.usage.output_tokens} tokens")
        try:
            async for result in client.map([*PROMPTS, ""], max_tokens=16):
                print(result.finish.reason)
        except PhotonError as error:
            print(f"refused, {error.reason} ({error.field}): {error}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
