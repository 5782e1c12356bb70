"""One attempt as the runner gets it.

Invariant: `lease_id` and `epoch` are what the store fences reports by; the runner hands them back unchanged.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fulmen_runner.attempts.errors import AgentFailed

JSON_CONTENT_TYPE = "application/json"
TEXT_CONTENT_TYPE = "text/plain; charset=utf-8"


class Mode(StrEnum):
    """What a rollout is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """An attempt to run.

    Attributes:
        attempt: `rollouts/{uuid}/attempts/{n}`.
        rollout: `rollouts/{uuid}`.
        number: The n of `attempt`.
        agent: `resources/{id}/versions/{n}`; empty means the agent that the runner was started with.
        input: What the agent is given.
        attempt_key: The agent's key for the model API. Secret.
        timeout_s: How long the attempt may run, in seconds.
        prompts: The texts of the prompts among `resource_versions`, by the same names; fetched before the agent runs.
    """

    attempt: str
    rollout: str
    number: int
    lease_id: str
    epoch: int
    project: str
    mode: Mode
    agent: str
    input: bytes = field(repr=False)
    input_content_type: str
    resource_versions: Mapping[str, str]
    attempt_key: str = field(repr=False)
    timeout_s: float
    prompts: Mapping[str, str] = field(default_factory=dict, repr=False)

    def task(self) -> object:
        """Decodes the input: JSON to its value, text to a string, anything else stays bytes.

        Raises:
            AgentFailed: If the input is not what its content type says.
        """
        return decoded_input(self.input, self.input_content_type)


def decoded_input(content: bytes, content_type: str) -> object:
    """Decodes an input: JSON to its value, text to a string, anything else stays bytes.

    Raises:
        AgentFailed: If it is not what its content type says.
    """
    media_type = content_type.split(";")[0].strip().lower() or JSON_CONTENT_TYPE
    try:
        if media_type == JSON_CONTENT_TYPE:
            return json.loads(content)
        if media_type.startswith("text/"):
            return content.decode()
    except ValueError as error:
        raise AgentFailed(f"The rollout's input is not valid {media_type}: {error}") from None
    return content
