"""Virtual environments of agents: those that a runner builds from requirements, and existing ones."""
