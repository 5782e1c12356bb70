"""Benchmarks of training: what is learned, how soon, and where the time goes."""
