"""Limits on the model calls of an attempt, as stated in its key."""

import json
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """Limits on the model calls of an attempt, in addition to the limits of its project.

    Attributes:
        token_budget: Maximum tokens of its model calls; 0 for the project's limit.
        training_run: Name of its training run, whose budget they use up; empty without one.
        agent: Version of its agent, whose budget they use up; empty without one.
        continues: Number of the first of the lost attempts whose model calls it continues; 0 if it continues none.
    """

    token_budget: int = 0
    training_run: str = ""
    agent: str = ""
    continues: int = 0

    def claims(self) -> str:
        """Returns the claims of a key, as they follow others in a JSON object; empty without terms."""
        budget = f',"bud":{self.token_budget}' if self.token_budget else ""
        run = f',"run":{_quoted(self.training_run)}' if self.training_run else ""
        agent = f',"agt":{_quoted(self.agent)}' if self.agent else ""
        continues = f',"cnt":{self.continues}' if self.continues else ""
        return budget + run + agent + continues


NO_TERMS: Final = CallTerms()
_quoted = json.encoder.encode_basestring_ascii
