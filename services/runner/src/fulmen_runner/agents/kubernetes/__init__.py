"""Agents that are Jobs of a Kubernetes cluster."""
