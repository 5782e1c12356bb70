"""Benchmark of routing: agents with growing conversations over engines with prefix caches."""
