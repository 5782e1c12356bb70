"""One attempt as the store assigned it.

Invariant: the store fences reports by `lease_id` and `epoch`; the runner returns both unchanged.
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
    """An attempt to run, with the lease under which it runs.

    Attributes:
        attempt: `projects/{project}/rollouts/{uuid}/attempts/{n}`.
        rollout: `projects/{project}/rollouts/{uuid}`.
        number: The n of `attempt`.
        agent: `resources/{id}/versions/{n}`; empty for the runner's default agent.
        input: The task, encoded as `input_content_type`.
        attempt_key: The agent's key for the model API. Secret.
        timeout_s: Timeout of the attempt, in seconds.
        prompts: Text of each prompt among `resource_versions`, by name; fetched before the agent starts.
        secrets: Values of the secrets that its agent names, by variable; fetched before the agent starts. Secret.
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
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def masked_values(self) -> tuple[str, ...]:
        """What must not appear in output: the key and the secrets."""
        return (self.attempt_key, *self.secrets.values())

    def task(self) -> object:
        """Returns the decoded input; see `decoded_input`."""
        return decoded_input(self.input, self.input_content_type)


def decoded_input(content: bytes, content_type: str) -> object:
    """Returns the value of a JSON input, the string of a text input, and any other input as bytes.

    Raises:
        AgentFailed: If the content does not match its content type.
    """
    media_type = content_type.split(";")[0].strip().lower() or JSON_CONTENT_TYPE
    try:
        if media_type == JSON_CONTENT_TYPE:
            return json.loads(content)
        if media_type.startswith("text/"):
            return content.decode()
    except (ValueError, RecursionError) as error:
        raise AgentFailed(f"rollout input is not valid {media_type}: {error}") from None
    return content
