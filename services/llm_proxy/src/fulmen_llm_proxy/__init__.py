"""The LLM proxy: one door between agents and models, which never loses a token id."""

import fulmen_service_kit  # noqa: F401  (first: it settles what structlog imports)
