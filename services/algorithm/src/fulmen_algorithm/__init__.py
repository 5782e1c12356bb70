"""The algorithm service: training runs, their rollouts, their policies."""

import fulmen_service_kit  # noqa: F401  (first: it must settle how gRPC forks before grpc is imported)
