"""Weights as files: formats, deltas, adapters, publishing."""
