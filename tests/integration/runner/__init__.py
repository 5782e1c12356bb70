"""Integration tests of the runner: one part of it with real sockets, processes and threads."""
