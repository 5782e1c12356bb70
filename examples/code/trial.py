"""Runs a function that a model wrote on tests, by `confined.py`.

The function is an expression of `xs`, a list of whole numbers. Only arguments leave this process: results are compared here.
"""

import atexit
import json
import select
import subprocess
import sys
import threading
from pathlib import Path

HELPER = Path(__file__).with_name("confined.py")
MAX_CHARACTERS = 400
DEADLINE_S = 30.0
"""Time limit of the helper, in seconds. The helper ends a function earlier."""
PASSED = "passed"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs an expression of xs on the public tests.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


class Helper:
    """A process that forks one process per function. It is started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, code: str, arguments: list) -> dict:
        """Returns `results`, or the name of the function's `error`.

        Raises:
            RuntimeError: if the helper itself failed; the next call starts another.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(HELPER)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={},
                )  # fmt: skip
            assert self._process.stdin
            assert self._process.stdout
            try:
                self._process.stdin.write(json.dumps({"code": code, "arguments": arguments}) + "\n")
                self._process.stdin.flush()
                late = not select.select([self._process.stdout], [], [], DEADLINE_S)[0]
                return dict(json.loads("" if late else self._process.stdout.readline()))
            except (OSError, ValueError) as error:
                self.close()
                raise RuntimeError("The process that runs functions has failed.") from error

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


helper = Helper()
atexit.register(helper.close)


def run(code: object, tests: list) -> str:
    """Returns `passed`, the number of failed tests, or the name of the function's error.

    Args:
        code: What the model wrote; whatever is no short text is an error.
        tests: Pairs of an argument and the wanted result.
    """
    if not isinstance(code, str) or not code.strip() or len(code) > MAX_CHARACTERS:
        return "error SyntaxError"
    answer = helper.ask(code.strip(), [argument for argument, _ in tests])
    if "error" in answer:
        return f"error {answer['error']}"
    wrong = sum(not same(found, wanted) for found, (_, wanted) in zip(answer["results"], tests, strict=True))
    return f"wrong on {wrong} of {len(tests)}" if wrong else PASSED


def same(found: object, wanted: object) -> bool:
    """Compares results; unlike ==, it distinguishes True from 1."""
    return json.dumps(found) == json.dumps(wanted)
