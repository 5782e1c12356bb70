"""`fulmen rollout`, `queue`, `trace`, `spans`: what runs, what waits, and what it left."""
