"""Errors of starting a service."""


class StartupError(Exception):
    """The service cannot start; the text tells a person why and what to do."""
