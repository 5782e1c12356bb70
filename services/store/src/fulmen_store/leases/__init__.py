"""Leases and the runner sessions that hold them: how attempts begin, are checked, and end."""
