"""Clients of model servers: calls, keys, health probes."""
