"""The generated stubs alone, as in any other language: messages, metadata, deadline, the details of an error.

python clients/python/raw_stubs.py [TARGET]
"""

import sys

import grpc
from google.rpc import error_details_pb2, status_pb2

from photon_grpc.v1 import inference_pb2 as pb
from photon_grpc.v1 import inference_pb2_grpc, model_pb2, model_pb2_grpc

#: gRPC takes no answer above 4 MiB unless it is told to: scores of many tokens, and many outputs, are larger. What the
#: server sends at most is `limits.max_message_bytes` of GetModel.
OPTIONS = [("grpc.max_receive_message_length", -1)]


def main(target: str) -> None:
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        model = model_pb2_grpc.ModelServiceStub(channel).GetModel(model_pb2.GetModelRequest()).model
        print(f"{model.name}: context of {model.max_context_tokens} tokens")
        print("features:", ", ".join(model_pb2.Feature.Name(feature) for feature in model.features))
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        stream(inference)
        refused(inference)


def stream(inference: inference_pb2_grpc.InferenceServiceStub) -> None:
    request = pb.GenerateRequest(text="def fib(n):")
    request.sampling.temperature = 0  # optional fields: set to zero is not unset
    request.stop.max_tokens = 32
    call = inference.StreamGenerate(request, timeout=60, metadata=(("x-request-id", "raw-stubs-1"),))
    for response in call:
        for delta in response.deltas:
            print(delta.text, end="", flush=True)
            if delta.HasField("finish"):
                print(f"\n{pb.FinishReason.Name(delta.finish.reason)}, {response.usage.output_tokens} tokens")


def refused(inference: inference_pb2_grpc.InferenceServiceStub) -> None:
    request = pb.GenerateRequest(text="x")
    request.sampling.top_p = 0
    try:
        inference.Generate(request)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}")
        trailers = {each.key: each.value for each in error.trailing_metadata()}
        for detail in status_pb2.Status.FromString(trailers["grpc-status-details-bin"]).details:
            info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
            if detail.Unpack(info):
                print(f"reason {info.reason} of {info.domain}")
            elif detail.Unpack(bad):
                print("fields", ", ".join(violation.field for violation in bad.field_violations))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
