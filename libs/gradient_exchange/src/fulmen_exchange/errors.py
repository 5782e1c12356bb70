"""How exchanges end: in words that whoever runs the training is told. No torch is needed."""


class ExchangeFailed(Exception):
    """Ranks cannot go on exchanging; the text says what to do about it, and holds no secret."""


class RanksDiverged(ExchangeFailed):
    """Ranks that must hold the same weights do not; the text says in which round that was seen."""
