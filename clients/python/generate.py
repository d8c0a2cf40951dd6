"""One whole generation: what came back, why it ended, what it cost.

python clients/python/generate.py [TARGET]
"""

import asyncio
import sys

from photon_grpc.client import Client
from photon_grpc.errors import PhotonError, PromptTooLong


async def main(target: str) -> None:
    async with Client(target) as client:
        result = await client.generate("def fib(n):", max_tokens=48, temperature=0, logprobs=1)
        print(result.text)
        print(f"-- {result.model}: {result.usage.output_tokens} tokens, ended by {result.finish.reason}")
        print(f"-- first token after {result.timing.first_token_s * 1000:.0f} ms, seed {result.seed}")
        first = result.outputs[0].scores[0]
        print(f"-- first token {first.token_bytes!r}: logprob {first.logprob}, rank {first.rank}")
        try:
            await client.generate("x", max_tokens=1_000_000)
        except PromptTooLong as error:
            print(f"-- refused: {error.reason}, {error.needed} tokens of {error.limit}")
        except PhotonError as error:
            print(f"-- refused: {error.reason} ({error.field}): {error}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
