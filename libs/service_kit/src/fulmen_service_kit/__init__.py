"""What every Fulmen service needs: settings, logs, telemetry, tokens, the rpc edge and one lifecycle.

Importing it switches off gRPC's fork handlers, which must happen before grpc is imported: a process that a service
starts runs them between fork and exec (libuv, which uvloop uses, forks), where they crash it every twentieth time or so.
Services that start processes import this package first, in their own `__init__`.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
