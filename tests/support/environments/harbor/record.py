"""Records what Harbor 0.26 itself scores. Run by hand with Python 3.12 where it and the SDK are installed, as root or with namespaces:

python tests/support/environments/harbor/record.py > tests/integration/runner/data/harbor_scores.json

Trials are Harbor's; the environment is a folder in namespaces instead of a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import io
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

from fulmen.integrations.harbor_attempt import namespace

sys.path.insert(0, str(Path(__file__).parent))
from tasks import AGENT, said, write_tasks  # beside this file


class Folder(BaseEnvironment):
    """An environment in a folder: the task's files, `/tests`, `/logs` and `/agent`, seen through namespaces."""

    @staticmethod
    def type() -> str:
        """Its name."""
        return "folder"

    def _validate_definition(self) -> None:
        """Takes every definition."""

    async def start(self, force_build: bool) -> None:
        """Makes the folders, with the files as the Dockerfile of the tests copies them."""
        self.root = Path(tempfile.mkdtemp())
        for name in ("files/data", "logs/agent", "logs/verifier", "tests", "agent"):
            (self.root / name).mkdir(parents=True)
        shutil.copy(self.environment_dir / "numbers.txt", self.root / "files/data")

    async def stop(self, delete: bool) -> None:
        """Deletes the folders."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _place(self, path: str) -> Path:
        top, _, rest = str(path).strip("/").partition("/")
        return self.root / {"app": "files"}.get(top, top) / rest

    async def upload_file(self, source_path: Any, target_path: str) -> None:
        """Copies a file."""
        self._place(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._place(target_path))

    async def upload_dir(self, source_dir: Any, target_dir: str) -> None:
        """Copies a folder."""
        shutil.copytree(source_dir, self._place(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Any) -> None:
        """Copies a file."""
        shutil.copy(self._place(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Any) -> None:
        """Copies a folder."""
        shutil.copytree(self._place(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, user: Any = None
    ) -> Any:
        """Runs a command."""
        binds = ["--ro-bind", str(self.root / "agent"), "/agent", "--bind", str(self.root / "tests"), "/tests"]
        words = [*namespace(self.root, "/app", binds), "sh", "-c", command]
        process = await asyncio.create_subprocess_exec(
            *words,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "FACTOR": "3", **(env or {})},
        )
        output, errors = await process.communicate()
        return ExecResult(stdout=output.decode(), stderr=errors.decode(), return_code=process.returncode or 0)


class Asking(BaseAgent):
    """The agent of the tests."""

    @staticmethod
    def name() -> str:
        """Its name."""
        return "asking"

    def version(self) -> str:
        """Its version."""
        return "1"

    async def setup(self, environment: Any) -> None:
        """Brings its program. The tests are not there yet."""
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(AGENT)
            file.flush()
            await environment.upload_file(file.name, "/agent/ask.py")

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        """Runs its program."""
        variables = {"OPENAI_BASE_URL": os.environ["SCRIPTED_URL"], "OPENAI_API_KEY": "none", "ASKED": instruction}
        await environment.exec(f'printf %s "$ASKED" | {sys.executable} /agent/ask.py', env=variables)


class Model(http.server.BaseHTTPRequestHandler):
    """The scripted model."""

    def do_POST(self) -> None:
        """Answers a request."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": said(body["messages"][-1]["content"])}
        answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


async def scores(folder: Path) -> dict[str, Any]:
    """Runs a trial of each task; returns its rewards by name."""
    found = {}
    for path in write_tasks(folder / "tasks"):
        config = TrialConfig(
            task=TaskConfig(path=path),
            trials_dir=folder / "trials",
            agent=AgentConfig(import_path="record:Asking"),
            environment=EnvironmentConfig(import_path="record:Folder"),
        )
        result = await (await Trial.create(config)).run()
        assert result.verifier_result is not None, result.exception_info
        found[path.name] = result.verifier_result.rewards
    return found


def main() -> None:
    """Prints the rewards."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["SCRIPTED_URL"] = f"http://127.0.0.1:{server.server_port}/v1"
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        found = asyncio.run(scores(Path(folder)))
    sys.stdout.write(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
