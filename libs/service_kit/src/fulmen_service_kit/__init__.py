"""What every Fulmen service needs: settings, logs, telemetry, tokens, the rpc edge and one lifecycle.

Importing it switches off gRPC's fork handlers, which must happen before grpc is imported: a process that a service
starts runs them between fork and exec (libuv, which uvloop uses, forks), where they crash it every twentieth time or so.
It also imports structlog as if rich were not installed, which takes 3 MB of every process for tracebacks that `logs`
never lets it format.
Services import this package first, in their own `__init__`.
"""

import os
import sys

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

if "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # what the import system takes for "there is none"
    try:
        import structlog  # noqa: F401 - for its effect
    finally:
        del sys.modules["rich"]
