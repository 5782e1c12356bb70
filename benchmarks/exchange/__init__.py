"""Benchmarks of the compressed exchange of gradients."""
