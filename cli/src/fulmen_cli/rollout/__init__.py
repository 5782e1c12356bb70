"""`fulmen rollout`, `queue`, `trace` and `spans`."""
