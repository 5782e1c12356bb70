"""`fulmen doctor` and `fulmen support-bundle` over a real stack: what fails is named, and what is secret stays."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen.rpc.services import connect
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.runs import create_rollouts, ended_rollout, eventually
from tests.support.algorithm.training import POLICY, publish_training_inputs
from tests.support.cli.commands import fulmen
from tests.support.llm_proxy.backend import MODEL, Backend
from tests.support.stack import running_stack, stack_targets

pytestmark = [pytest.mark.serial, pytest.mark.timeout(240)]

PROMPT = "a-prompt-that-nobody-else-may-see"
# Says its prompt wherever an agent can: to the model, on both outputs, and in the text of an error.
AGENT = b"""\
import sys

from openai import AsyncOpenAI


async def solve(task):
    question = task["input"]["question"]
    print("asked:", question)
    print('{"event": "looks like a log", "prompt": "%s"}' % question, file=sys.stderr, flush=True)
    await AsyncOpenAI().chat.completions.create(model="tiny", messages=[{"role": "user", "content": question}])
    raise ValueError(question)


def grade(task, outcome):
    return 0.0
"""


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    """Yields a model server."""
    async with Backend() as running:
        yield running


async def looked(stack: LocalStack, *arguments: str) -> dict[str, dict]:
    """Returns what doctor finds, by name; its exit status says whether something fails."""
    done = await fulmen("doctor", "--output", "json", *arguments, "--state-dir", stack.folder.path)
    found = {each["what"]: each for each in json.loads(done.stdout)}
    assert done.status == any(each["ok"] is False for each in found.values()), done.stderr
    return found


def named(stack: LocalStack) -> list[str]:
    """Returns the options that name the services of a stack, as of one elsewhere."""
    targets = stack_targets(stack)
    return [
        *("--store-target", targets.store, "--algorithm-target", targets.algorithm),
        *("--llm-proxy-target", targets.llm_proxy, "--token", stack.client_token),
    ]


@pytest.mark.long(short=True)
async def test_what_is_wrong_with_a_deployment_is_named_with_what_to_do(short_tmp_path: Path, backend: Backend) -> None:
    async with running_stack(short_tmp_path) as stack:
        there = ("--state-dir", str(short_tmp_path))
        await fulmen("proxy", "backend", "add", "one", backend.url, "--token-ids", *there)
        await fulmen("proxy", "route", "put", MODEL, "--target", f"one:{MODEL}", *there)

        async def sees_its_runner() -> dict[str, dict] | None:
            found = await looked(stack, *named(stack), "--call", MODEL)
            return found if found["queue"]["ok"] else None

        found = await eventually(sees_its_runner, what="the runner is connected")
        assert {name for name, each in found.items() if not each["ok"]} == set(), found
        assert {
            "token",
            "store",
            "algorithm",
            "proxy",
            "database",
            "skew",
            "clocks",
            "backends",
            "capture",
        } < found.keys()
        assert "role admin, all projects" in found["token"]["text"]

        forged = await looked(stack, *named(stack)[:-1], stack.client_token[:-6] + "AAAAAA")
        assert (forged["access"]["ok"], "refuses the token" in forged["access"]["text"]) == (False, True)
        refused = await looked(stack, "--call", "no-such-model")
        assert (refused["capture"]["ok"], "no-such-model" in refused["capture"]["text"]) == (False, True)

        await stack.kill_service("algorithm")
        await stack.kill_service("runner-1")
        await stack.kill_database()

        async def knows() -> dict[str, dict] | None:
            found = await looked(stack, *named(stack))
            return found if found["database"]["ok"] is False else None

        found = await eventually(knows, what="the store says that it has no database")
        assert found["algorithm"]["ok"] is False
        assert found["store"]["ok"] is True
        assert all(each["advice"] for each in found.values() if each["ok"] is False)


@pytest.mark.long(short=True)
async def test_a_bundle_has_what_helps_and_no_secret_and_no_payload(
    short_tmp_path: Path, backend: Backend, repository_root: Path, tmp_path: Path
) -> None:
    target = tmp_path / "bundle.tar.gz"
    # Services that are started, not forked: of a fork the system shows the environment of its parent.
    async with running_stack(short_tmp_path, environment={"PYTHONHASHSEED": "1"}) as stack:
        there = ("--state-dir", str(short_tmp_path))
        await fulmen("proxy", "backend", "add", "one", backend.url, "--token-ids", *there)
        await fulmen("proxy", "route", "put", POLICY, "--target", f"one:{MODEL}", *there)
        async with connect(stack_targets(stack), token=stack.client_token) as client:
            inputs = await publish_training_inputs(client, repository_root, agent=AGENT)
            task = json.dumps({"input": {"question": PROMPT}}).encode()
            [rollout] = await create_rollouts(client, inputs["agent"], [task])
            await ended_rollout(client, rollout)
        done = await fulmen("support-bundle", "--file", target, *there)
        assert (done.status, f"wrote {target}" in done.stdout) == (0, True), done.stderr
        again = await fulmen("support-bundle", "--file", target, *there)
        assert again.status == 4
        assert PROMPT.encode() in b"".join(path.read_bytes() for path in (short_tmp_path / "logs").iterdir())
        secrets = [
            path.read_text().strip() for path in (*short_tmp_path.glob("*.key"), *short_tmp_path.glob("*.token"))
        ]

    with tarfile.open(target) as archive:
        files = {
            entry.name.removeprefix("fulmen-support/"): archive.extractfile(entry).read().decode()
            for entry in archive.getmembers()
        }
    assert target.stat().st_mode & 0o077 == 0
    whole = "\n".join(files.values())
    assert len(secrets) >= 3
    assert not [secret for secret in (*secrets, PROMPT) if secret in whole]
    assert not re.search(r"eyJ[\w-]+\.[\w-]+\.", whole)
    pages = {f"metrics/{name}.txt" for name in ("store", "llm_proxy", "algorithm", "runner-1")}
    assert {
        "doctor.json",
        "versions.json",
        "settings/store.json",
        "stack.json",
        "queue.json",
        "runs.json",
        *pages,
    } < files.keys()
    settings = json.loads(files["settings/store.json"])
    assert settings["FULMEN_STORE_PORT"].isdecimal()
    # Services overwrite secrets in their environment; what is left is masked.
    assert not [value for name, value in settings.items() if "KEY" in name or "URL" in name if value.strip("*")]
    assert "fulmen_store_queue_depth" in files["metrics/store.txt"]
    events = [json.loads(line)["event"] for line in files["logs/runner-1.log"].splitlines()]
    assert {"serving", "lines_left_out"} <= set(events)
    assert json.loads(files["doctor.json"])
