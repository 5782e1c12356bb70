"""The LLM proxy: the gateway between agents and models, which captures every token id."""

import fulmen_service_kit  # noqa: F401  (first: it settles what structlog imports)
