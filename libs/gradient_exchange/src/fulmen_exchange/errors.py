"""Errors that end an exchange. No torch is needed."""


class ExchangeFailed(Exception):
    """The ranks cannot continue exchanging gradients. The message has the remedy and contains no secret."""


class RanksDiverged(ExchangeFailed):
    """Ranks that must hold the same weights do not."""


class HookUnsupported(Exception):
    """The model or its optimiser cannot use an exchange. The message names an alternative."""
