"""Prometheus metrics, one file for each part of the service."""
