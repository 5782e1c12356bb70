"""Crash matrix and power cuts: every part of a local stack, every fault, under a training run that must end."""
