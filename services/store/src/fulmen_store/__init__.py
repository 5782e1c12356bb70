"""The store: the queue of rollouts, their attempts, spans and resources, on PostgreSQL."""

import fulmen_service_kit  # noqa: F401  (first: it settles what structlog imports)
