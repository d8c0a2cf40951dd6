"""A conversation: messages in, the answer appended, the next question after it. Without asyncio.

python clients/python/chat.py [TARGET]
"""

import sys

from photon_grpc.client import SyncClient


def main(target: str) -> None:
    messages = [{"role": "system", "content": "You complete Python code."}]
    with SyncClient(target) as client:
        for question in ("def add(a, b):", "def is_even(n):"):
            print(f"user: {question}\nassistant: ", end="")
            messages.append({"role": "user", "content": question})
            answer = ""
            for delta in client.stream(messages, max_tokens=24, temperature=0):
                print(delta.text, end="", flush=True)
                answer += delta.text
            messages.append({"role": "assistant", "content": answer})
            print()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
