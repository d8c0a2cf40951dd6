"""A caller with the stubs that protoc made of triage.proto, and nothing of photon_grpc.

python call.py [TARGET]
"""

import sys

import grpc
import triage_pb2
import triage_pb2_grpc


def main(target: str) -> None:
    ticket = triage_pb2.Ticket(subject="It leaks", body="There is water under the machine.", email="a@example.com")
    with grpc.insecure_channel(target) as channel:
        service = triage_pb2_grpc.TriageServiceStub(channel)
        verdict = service.Triage(ticket, timeout=60)
        print(f"{triage_pb2.Team.Name(verdict.team)}, severity {verdict.severity}: {verdict.summary}")
        for step in service.Plan(ticket, timeout=60):
            print(f"- {step.action} ({step.minutes} minutes)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
