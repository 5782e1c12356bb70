"""Agents that are Python callables, in the runner's process or in a child of it."""
