"""Targets that call running services over their sockets, one per file; see `tests.fuzz.world`."""
