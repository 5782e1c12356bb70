"""Startup errors of a service."""


class StartupError(Exception):
    """The service cannot start; the text says why and what to do."""
