"""The runner: leases attempts, runs agents, reports outcomes. It keeps nothing on disk that matters."""

import fulmen_service_kit  # noqa: F401  (first: it must settle how gRPC forks before grpc is imported)
