"""Startup errors of a service."""


class StartupError(Exception):
    """The service cannot start; the message has the reason and the remedy."""
