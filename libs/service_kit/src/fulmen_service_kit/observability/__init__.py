"""Logs, traces and metrics of the service itself."""
