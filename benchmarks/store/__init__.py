"""Benchmarks of the store: rollouts, spans, a backlog of a million, and the peers beside it."""
