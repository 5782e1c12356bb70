"""A gRPC health probe for containers: `python -m fulmen_service_kit.probe HOST:PORT` exits 0 if it serves."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def main() -> int:
    """Asks the named server for its health; returns the exit status."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m fulmen_service_kit.probe HOST:PORT\n")
        return 2
    with grpc.insecure_channel(sys.argv[1]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{sys.argv[1]} does not answer: {error.code().name}\n")
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
