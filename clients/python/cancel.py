"""Leaving early: each of these ends the request on the server at its next step and frees what it holds.

python clients/python/cancel.py [TARGET]
"""

import asyncio
import sys

from photon_grpc.client import Client
from photon_grpc.errors import DeadlinePassed

PROMPT = "import os\n"


async def main(target: str) -> None:
    async with Client(target) as client:
        async with client.stream(PROMPT, max_tokens=2000, ignore_eos=True) as stream:
            async for _ in stream:
                break
        print("left the loop")

        task = asyncio.create_task(client.generate(PROMPT, max_tokens=2000, ignore_eos=True))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        print("cancelled the task:", task.cancelled())

        try:
            await client.generate(PROMPT, max_tokens=2000, ignore_eos=True, timeout=0.05)
        except DeadlinePassed as error:
            print("deadline:", error.reason)

        # Ends the output, not the call: what came until then is the result.
        result = await client.generate(PROMPT, max_tokens=2000, ignore_eos=True, max_duration=0.05)
        print("kept what there was:", result.finish.reason)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
