"""The model API of a check: what it knows of a call when the agent has its answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from fulmen_cli.agent.models import Answer
from fulmen_cli.agent.recording import CallRecord, Recording
from fulmen_cli.agent.server import listening

LOOKS_S = 0.3
ROLLOUT, KEY = "projects/a/rollouts/1", "key"


class Refuses:
    """A model whose endpoint refuses every call."""

    name = "refuses"

    def __init__(self, status: int) -> None:
        self._status = status

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        return Answer(status=self._status, content_type="application/json", pieces=self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        yield b'{"error": '
        yield b'{"message": "no"}}'


class SlowRecording(Recording):
    """Takes so long to remember a call that an agent with its answer has gone on; notes whether one had it."""

    def __init__(self) -> None:
        super().__init__()
        self.answered, self.late = threading.Event(), False

    def add_call(self, rollout: str, call: CallRecord) -> None:
        self.late = self.answered.wait(LOOKS_S)
        super().add_call(rollout, call)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_refused_call_is_known_before_the_agent_has_the_status(status: int) -> None:
    recording = SlowRecording()
    recording.begin(ROLLOUT, KEY)
    with listening(Refuses(status), recording) as here:
        connection = HTTPConnection(urlsplit(here.models_url).netloc, timeout=30)
        connection.request("POST", "/v1/chat/completions", b'{"model": "m"}', {"Authorization": f"Bearer {KEY}"})
        # Clients raise an error of the status alone: they need not read the rest.
        answer = connection.getresponse()
        recording.answered.set()
        assert json.load(answer) == {"error": {"message": "no"}}
        connection.close()
    assert [(call.status, call.error) for call in recording.calls(ROLLOUT)] == [(status, "no")]
    assert not recording.late
