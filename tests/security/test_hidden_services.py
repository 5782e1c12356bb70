"""No process of the same user reads the secrets of a service from its environment or its memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.tokens import Role
from tests.support.runner.harness import SIGNING_KEY, token
from tests.support.runner.stores import RealStore
from tests.support.service_kit.processes import serving_process

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or (os.geteuid() == 0 and shutil.which("setpriv") is None),
    reason="reads /proc, and as root needs setpriv to be without privileges",
)
READER = """
import sys
for name in ("environ", "mem", "maps", "fd/0"):
    try:
        open(f"/proc/{sys.argv[1]}/{name}", "rb").close()
        print(name)
    except OSError:
        pass
"""


def read_by_the_same_user(pid: int) -> list[str]:
    """Returns the files of a process that its own user can open; root without its privileges is a user like any."""
    command = [sys.executable, "-I", "-S", "-c", READER, str(pid)]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--", *command]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()


def family(pid: int) -> Iterator[int]:
    """Yields a process and all its descendants."""
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from family(int(child))


@pytest.fixture
async def services(database_url: str, tmp_path: Path) -> AsyncIterator[dict[str, int]]:
    """Runs all services, with every secret in the environment; yields their process ids."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(RealStore(database_url))
        free = {"port": 0, "metrics_port": 0, "store_target": store.target}
        service = free | {"token": token(Role.SERVICE)}
        proxy = service | {
            "http_port": 0,
            "attempt_key_secret": attempt_secrets(SIGNING_KEY),
            "spool_dir": tmp_path / "spool",
            "workers": 2,
            "backend_keys": '{"vendor": {"key": "sk-secret", "hosts": ["api.example.com"]}}',
        }
        algorithm = service | {"state_dir": tmp_path / "state", "engine_token": "secret"}
        found = {"store": store.pid}
        for name, settings in (
            ("llm_proxy", proxy),
            ("algorithm", algorithm),
            ("runner", free | {"token": token(Role.RUNNER)}),
        ):
            running = await stack.enter_async_context(serving_process(f"fulmen_{name}", settings))
            found[name] = running.pid
        yield found


async def test_nothing_of_any_service_is_readable_for_its_own_user(services: dict[str, int]) -> None:
    readable = {name: [read_by_the_same_user(pid) for pid in family(pid)] for name, pid in services.items()}
    assert {name: [each for each in found if each] for name, found in readable.items()} == {
        name: [] for name in services
    }
    assert len(readable["llm_proxy"]) == 3, "its workers, too"


async def test_not_even_root_finds_a_secret_in_the_environment_of_a_service(services: dict[str, int]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root reads the environment of a hidden process")
    kept = {
        name: [
            entry[:40]
            for process in family(pid)
            for entry in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if any(secret in entry for secret in (b"eyJ", b"sk-secret", SIGNING_KEY.encode(), b"postgresql://"))
        ]
        for name, pid in services.items()
    }
    assert kept == {name: [] for name in services}
