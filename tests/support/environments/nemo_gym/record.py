"""Records what NeMo Gym 0.4 itself scores: its simple agent and its base of resources servers. Run by hand with Python 3.12:

python tests/support/environments/nemo_gym/record.py > tests/integration/runner/data/nemo_gym_scores.json

With `serve PORT` it only runs the resources server.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import requests
import uvicorn
from fastapi import FastAPI, Request
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionRequest,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig, ModelServerRef, ResourcesServerRef
from nemo_gym.server_utils import SESSION_ID_KEY, ServerClient
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict
from responses_api_agents.simple_agent.app import SimpleAgent, SimpleAgentConfig

sys.path.insert(0, str(Path(__file__).parent))
from rules import begin, reward, rows, said  # beside this file


class Seed(BaseSeedSessionRequest):
    """A row."""

    model_config = ConfigDict(extra="allow")


class Verify(BaseVerifyRequest):
    """A row with the response."""

    wanted: int


class Added(BaseModel):
    """What is added."""

    number: int


class Counter(SimpleResourcesServer):
    """The resources server of the tests."""

    config: BaseResourcesServerConfig
    counters: ClassVar[dict[str, int]] = {}

    def setup_webserver(self) -> FastAPI:
        """Adds the tool."""
        app = super().setup_webserver()
        app.post("/add")(self.add)
        return app

    async def seed_session(self, request: Request, body: Seed) -> BaseSeedSessionResponse:
        """Begins a session."""
        self.counters[request.session[SESSION_ID_KEY]] = begin(body.model_dump())
        return BaseSeedSessionResponse()

    async def add(self, request: Request, body: Added) -> dict[str, int]:
        """The tool."""
        self.counters[request.session[SESSION_ID_KEY]] += body.number
        return {"counter": self.counters[request.session[SESSION_ID_KEY]]}

    async def verify(self, request: Request, body: Verify) -> BaseVerifyResponse:
        """Scores the episode."""
        outputs = [each.model_dump() for each in body.response.output]
        value = reward(body.wanted, self.counters[request.session[SESSION_ID_KEY]], outputs)
        return BaseVerifyResponse(**body.model_dump(), reward=value)


class Model(http.server.BaseHTTPRequestHandler):
    """The scripted model."""

    def do_POST(self) -> None:
        """Answers a request of the Responses API."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answered = [each["output"] for each in body["input"] if each.get("type") == "function_call_output"]
        what, text = said(body["input"][0]["content"], answered)
        output: dict[str, Any] = {
            "type": "function_call",
            "call_id": "c1",
            "name": "add",
            "arguments": text,
            "id": "f1",
        }
        if what == "tell":
            part = {"type": "output_text", "text": text, "annotations": []}
            output = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [part]}
        held = {"id": "r1", "object": "response", "created_at": 1, "model": "tiny", "output": [output]}
        rest = {
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools", []),
            "status": "completed",
        }
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({**held, **rest}).encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def served(app: FastAPI, port: int) -> None:
    """Serves an app in a thread, and waits until it does."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)


def main() -> None:
    """Prints the reward of each row."""
    model = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=model.serve_forever, daemon=True).start()
    ports = {"counter": 18981, "agent": 18982, "model": model.server_port}
    kinds = {"counter": "resources_servers", "agent": "responses_api_agents", "model": "responses_api_models"}
    held = {name: {kinds[name]: {name: {"host": "127.0.0.1", "port": port}}} for name, port in ports.items()}
    head = BaseServerConfig(host="127.0.0.1", port=1)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(held))
    common = {"host": "127.0.0.1", "entrypoint": "app.py", "domain": "other"}
    config = BaseResourcesServerConfig(name="counter", port=ports["counter"], **common)
    port = int(sys.argv[2]) if sys.argv[1:2] == ["serve"] else ports["counter"]
    served(Counter(config=config, server_client=client).setup_webserver(), port)
    if sys.argv[1:2] == ["serve"]:
        threading.Event().wait()
    asking = SimpleAgentConfig(
        name="agent",
        port=ports["agent"],
        resources_server=ResourcesServerRef(type="resources_servers", name="counter"),
        model_server=ModelServerRef(type="responses_api_models", name="model"),
        **common,
    )
    served(SimpleAgent(config=asking, server_client=client).setup_webserver(), ports["agent"])
    found = []
    for row in rows():
        answer = requests.post(f"http://127.0.0.1:{ports['agent']}/run", json=row, timeout=60)
        answer.raise_for_status()
        found.append(answer.json()["reward"])
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
