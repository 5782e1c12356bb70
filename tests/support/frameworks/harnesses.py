"""The command lines of coding agents as examples/harnesses runs them, on a stage of the tests, and what was captured of them."""

from __future__ import annotations

import json
import os
import subprocess
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fulmen.store.v1 import rollout_pb2, span_service_pb2
from fulmen.train_toml.train import load_train_config
from fulmen.trajectories import Trajectory, trajectory
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.frameworks.coder import JSON, Coder, template_of
from tests.support.frameworks.traced import OWN_PYTHON, Stage, Traced, a_stage
from tests.support.frameworks.world import ENVIRONMENTS, PROGRAM_S, ROOT, said
from tests.support.llm_proxy.backend import Script, logprob_of, token_ids_of
from tests.support.llm_proxy.harness import MODEL
from tests.support.runner.harness import bundle_of, rollouts_of, spec_of

FOLDER = ROOT / "examples" / "harnesses"
PROGRAMS = {
    "claude-code": ENVIRONMENTS / "harnesses/node_modules/.bin/claude",
    "codex": ENVIRONMENTS / "harnesses/node_modules/.bin/codex",
    "mini-swe-agent": ENVIRONMENTS / "mini_swe_agent/bin/mini",
}
"""Where the program of a harness is, by the name of its `.toml`."""


@dataclass(frozen=True, kw_only=True)
class Worked:
    """An attempt of a harness that ended."""

    run: Traced
    records: list[ModelCallRecord]
    trajectory: Trajectory
    requests: list[JSON]
    """What the model was asked, in order."""

    @property
    def rewards(self) -> list[float]:
        """What the grader gave."""
        return [reward.value for reward in self.run.attempt.rewards]

    def check_captures(self) -> None:
        """Every request to the model is recorded once, token by token, and every token that it said is trained on."""
        assert len(self.records) == len(self.requests)
        asked = [template_of(request["messages"]) for request in self.requests]
        assert sorted(array("i", record.prompt_token_ids).tolist() for record in self.records) == sorted(asked)
        for record in self.records:
            ids, logprobs = array("i", record.completion_token_ids), array("f", record.completion_logprobs)
            assert record.usable
            assert ids.tolist() == token_ids_of(said(record))
            assert logprobs == array("f", [logprob_of(token, place) for place, token in enumerate(ids)])
        assert self.trajectory.dropped == ()
        trained = sum(sum(row.loss_mask) for row in self.trajectory.rows)
        assert trained == sum(len(array("i", record.completion_token_ids)) for record in self.records)


@dataclass(kw_only=True)
class Workshop:
    """A stage with a runner for harnesses, whose model does as a script says that tests change."""

    stage: Stage
    minds: list[Script]

    async def work(self, harness: str, script: Script) -> Worked:
        """Has a harness do the first task of the example, as its `.toml` says, but with the model and programs of the tests."""
        self.minds.append(script)
        seen = len(self.stage.backend.received)
        [run] = await self.stage.play(*await _rollouts(self.stage, harness))
        request = span_service_pb2.StreamSpansRequest(parents=[run.name])
        chunks = [chunk async for answer in self.stage.stubs.spans.StreamSpans(request) for chunk in answer.chunks]
        return Worked(
            run=run,
            records=[node.record for node in run.nodes("CALL") if node.record is not None],
            trajectory=trajectory(chunks),
            requests=[received.body for received in self.stage.backend.received[seen:]],
        )


@asynccontextmanager
async def a_workshop() -> AsyncIterator[Workshop]:
    """Runs a stage and a runner for harnesses."""
    minds: list[Script] = []
    async with a_stage(lambda body: minds[-1](body), Coder) as stage, stage.runner(OWN_PYTHON):
        yield Workshop(stage=stage, minds=minds)


async def _rollouts(stage: Stage, harness: str) -> list[rollout_pb2.Rollout]:
    assert PROGRAMS[harness].exists(), f"{harness} is not installed: run `make test-frameworks`"
    agent = load_train_config(FOLDER / f"{harness}.toml").agent
    assert agent is not None
    names = subprocess.run(["git", "ls-files"], cwd=FOLDER, check=True, capture_output=True, text=True).stdout.split()
    bundle = await stage.publish("bundle", bundle_of({name: (FOLDER / name).read_text() for name in names}))
    path = os.pathsep.join([str(PROGRAMS[harness].parent), os.environ["PATH"]])
    content = spec_of(
        bundle=bundle,
        command=tuple(agent.command),
        command_grader=tuple(agent.grader_command),
        environment={**agent.environment, "AGENT_MODEL": MODEL, "PATH": path},
    )
    task = json.loads((FOLDER / "tasks.jsonl").read_text().splitlines()[0])
    return rollouts_of(await stage.publish("agent", content), [task], max_attempts=1, timeout_s=PROGRAM_S)
