"""Settings of opponents that are past versions of the policy. Importable without torch."""

from typing import Annotated, Literal

from pydantic import Field

from fulmen_algorithm.training.strict import Strict


class NoOpponent(Strict):
    """No opponent is served."""

    kind: Literal["none"] = "none"


class PastOpponent(Strict):
    """Serves a past version of the policy beside the current one, as the model `<policy>-past`.

    Agents ask for that name where the opponent moves; what it samples does not train. Every `every` training steps the
    present version joins a pool of the newest `keep`, and one of the pool becomes the opponent.

    Attributes:
        every: Training steps between two opponents.
        keep: Versions in the pool.
        pick: `uniform` draws from the pool by the seed, so that the policy does not forget to beat older ones; `latest`
            uses the newest version in the pool.

    Source: fictitious self-play (Heinrich et al., 2015); a pool of past opponents as in OpenAI Five (arXiv:1912.06680).
    """

    kind: Literal["past"] = "past"
    every: int = Field(default=10, ge=1, le=1_000_000)
    keep: int = Field(default=5, ge=1, le=100)
    pick: Literal["uniform", "latest"] = "uniform"


OpponentSettings = Annotated[NoOpponent | PastOpponent, Field(discriminator="kind")]
