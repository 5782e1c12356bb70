"""Leases and runner sessions: how attempts begin, are checked, and end."""
