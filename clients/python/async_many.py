"""Many requests at once over one connection: the server batches them. One that is refused does not disturb the others.

python clients/python/async_many.py [TARGET]
"""

import asyncio
import sys

from photon_grpc.client import Client
from photon_grpc.errors import Overloaded, PhotonError

PROMPTS = ["import os\n", "def main():", "class Node:", "for i in range(", "try:\n", "with open(", "return sorted(", ""]


async def complete(client: Client, prompt: str) -> str:
    while True:
        try:
            return (await client.generate(prompt, max_tokens=16, temperature=0)).text
        except Overloaded as error:
            # The server says when it expects to have room again.
            await asyncio.sleep(error.retry_after_s or 1.0)


async def main(target: str) -> None:
    async with Client(target) as client:
        results = await asyncio.gather(*(complete(client, prompt) for prompt in PROMPTS), return_exceptions=True)
    for prompt, result in zip(PROMPTS, results, strict=True):
        if isinstance(result, PhotonError):
            print(f"{prompt!r}: refused, {result.reason} ({result.field}): {result}")
        else:
            print(f"{prompt!r} -> {result!r}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
