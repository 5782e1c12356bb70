"""Makes work for unit tests."""

from __future__ import annotations

from fulmen.ids import attempt_name, rollout_name, uuid7
from fulmen_runner.domain.work import JSON_CONTENT_TYPE, Mode, Work


def work(
    *, input_: bytes = b"{}", content_type: str = JSON_CONTENT_TYPE, key: str = "secret-key", timeout_s: float = 30.0
) -> Work:
    """Returns an attempt of a new rollout."""
    rollout_id = uuid7()
    return Work(
        attempt=attempt_name(rollout_id, 1),
        rollout=rollout_name(rollout_id),
        number=1,
        lease_id="session",
        epoch=1,
        project="projects/default",
        mode=Mode.TRAIN,
        agent="resources/agent.x/versions/1",
        input=input_,
        input_content_type=content_type,
        resource_versions={},
        attempt_key=key,
        timeout_s=timeout_s,
    )
