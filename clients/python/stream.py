"""Text as it is produced; leaving the loop early ends the request on the server, too.

python clients/python/stream.py [TARGET]
"""

import asyncio
import sys

from photon_grpc.client import Client


async def main(target: str) -> None:
    async with Client(target) as client:
        stream = client.stream("class Stack:", max_tokens=64, temperature=0.7, seed=1, stop_strings=["\nclass "])
        async for delta in stream:
            print(delta.text, end="", flush=True)
            if delta.finish:
                print(f"\n-- {delta.finish.reason}, {stream.usage}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
