"""Shared infrastructure of services: settings, logs, telemetry, tokens, the rpc edge and the lifecycle.

Services import this package first, in their own `__init__`, because importing it has two effects. It disables gRPC's
fork handlers, which must happen before grpc is imported: they run between fork and exec (uvloop forks), where they
occasionally crash the new process. And it imports structlog without rich, which would take 3 MB per process for
tracebacks that `logs` does not use.
"""

import os
import sys

GRPC_FORKS = "GRPC_ENABLE_FORK_SUPPORT"
os.environ.setdefault(GRPC_FORKS, "0")

if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # makes the import fail
    try:
        import structlog  # noqa: F401 - for its effect
    finally:
        del sys.modules["rich"]
