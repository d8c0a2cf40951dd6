"""Output of a form that is given: a protobuf message, filled while it is written; a dataclass; a choice.

Any generated message class will do; this one comes with the client. Pydantic models are taken like dataclasses, and
JSON Schema as it is.

python clients/python/structured.py [TARGET]
"""

import sys
from dataclasses import dataclass
from typing import Literal

from photon_grpc.client import MessageMismatch, SyncClient
from photon_grpc.v1.inference_pb2 import Usage

PROMPT = '{"promptTokens":7,"outputTokens":12}\n{"promptTokens":9,"outputTokens":15}\n'


@dataclass
class Point:
    x: Literal[0, 1, 2]
    y: Literal[0, 1, 2]


def main(target: str) -> None:
    with SyncClient(target) as client:
        usage = client.generate_message(PROMPT, Usage, max_tokens=200, temperature=0)
        print("message:", type(usage).__name__, usage.output_tokens)

        try:
            for partial in client.stream_messages(PROMPT, Usage, max_tokens=200, temperature=0):
                print("so far:", str(partial).split())
        except MessageMismatch as error:
            print("cut off:", error)

        result = client.generate("point = ", json_schema=Point, max_tokens=100, seed=1)
        try:
            print("object:", result.parsed)
        except MessageMismatch as error:
            print("cut off:", error.text)

        print("choice:", client.generate("The answer is ", choices=["yes", "no"], temperature=0).text)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
