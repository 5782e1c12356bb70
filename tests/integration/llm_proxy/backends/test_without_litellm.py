"""Backends of other vendors where there is no LiteLLM, and a proxy that never has it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import running_proxy
from tests.support.llm_proxy.litellm_world import lead, register
from tests.support.llm_proxy.waits import eventually

LIMIT_S = 60.0


@pytest.mark.parametrize(
    ("python", "reason"), [("", "is not set up"), (sys.executable, "is missing in its environment")]
)
async def test_without_litellm_calls_fail_with_the_remedy_and_the_backend_is_ill(python: str, reason: str) -> None:
    async with (
        FakeStore() as store,
        running_proxy(store.target, litellm_python=python, retry_deadline_s=0, health_interval_s=0.1) as proxy,
    ):
        await register(proxy, "gemini", "http://127.0.0.1:1", key_name="")
        await lead(proxy, "gemini", "gemini")
        status, answer = await proxy.chat(proxy.attempt()[1], model="gemini")
        assert status == 502
        assert reason in answer["error"]["message"]
        assert "tools/litellm_env.sh" in answer["error"]["message"]

        async def is_ill() -> bool:
            health = await proxy.health("gemini")
            return not health.healthy and health.last_failure_kind == "litellm_not_installed"

        await eventually(is_ill)


async def test_the_proxys_own_process_has_no_litellm() -> None:
    code = (
        "import fulmen_llm_proxy.app, sys; print(*sorted({'litellm', 'httpx', 'boto3', 'openai'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert ran.stdout.split() == []
