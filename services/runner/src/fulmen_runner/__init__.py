"""The runner: leases attempts, runs agents, reports outcomes. It keeps nothing on disk that matters."""

import fulmen_service_kit  # noqa: F401  (first: it must settle how gRPC forks before grpc is imported)

import os

# Before grpc is imported: its fork handlers crash now and then (SIGSEGV) in the child that uvloop forks to start a
# process. Nothing here calls gRPC after a fork without an exec.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
