"""Leases of training runs."""
