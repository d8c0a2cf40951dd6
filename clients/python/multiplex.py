"""Thousands of requests over one stream of one connection, as ordinary calls.

python clients/python/multiplex.py [TARGET] [REQUESTS]
"""

import asyncio
import sys

from photon_grpc.client import Client
from photon_grpc.errors import PhotonError


async def main(target: str, num_requests: int) -> None:
    async with Client(target) as client, client.multiplex() as many:
        calls = (
            many.generate(f"def function_{number}(", max_tokens=8, ignore_eos=True, timeout=300)
            for number in range(num_requests)
        )
        results = await asyncio.gather(*calls, return_exceptions=True)
        async for delta in many.stream("class Stack:", max_tokens=24, temperature=0):
            print(delta.text, end="", flush=True)
    failed = [result for result in results if isinstance(result, PhotonError)]
    tokens = sum(result.usage.output_tokens for result in results if not isinstance(result, BaseException))
    print(f"\n-- {num_requests} requests over one stream: {tokens} tokens, {len(failed)} failed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051", int((sys.argv[2:] or ["64"])[0])))
