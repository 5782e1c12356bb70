"""Kinds of agents: Python callables, commands, containers, Kubernetes Jobs, and what they share."""
