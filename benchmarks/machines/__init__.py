"""Benchmarks of work on many machines, which are network namespaces behind shaped lines or nodes of a cluster."""
