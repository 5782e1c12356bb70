"""`fulmen train --in-process`: a training with all services in this process, so that breakpoints work everywhere."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fulmen.train_toml.agent import LimitsConfig
from fulmen.train_toml.train import TrainConfig
from fulmen_cli.command import run_at_once
from fulmen_cli.connection import Connection
from fulmen_cli.local.in_process import DEBUGGING, LOG, InProcessStack, run_with_agents_in_main_thread
from fulmen_cli.local.postgres import EmbeddedPostgres
from fulmen_cli.local.record import StackFolder, make_private
from fulmen_cli.local.stack import StackSettings

__all__ = ["run_training", "unhurried"]

FOLDER: Final = "in-process"
SLOTS: Final = 4
ROLLOUT_TIMEOUT: Final = "rollout_timeout_s"
# The longest that algorithms allow.
MAX_ROLLOUT_S: Final = 86_400
_WITH_ROLLOUTS: Final = frozenset({"grpo", "replay"})


def run_training(train: Callable[..., Awaitable[None]], connection: Connection, given: dict[str, Any]) -> None:
    """Runs `train`, with a stack in this process if `in_process` is set."""
    if not given["in_process"] or given["dry_run"]:
        run_at_once(train, connection, given)
        return
    folder = StackFolder(connection.state_dir.resolve() / FOLDER)
    report_dir = given["report_dir"] or connection.state_dir / "reports" / FOLDER

    async def work() -> None:
        settings = StackSettings(
            state_dir=folder.path, slots=SLOTS, use_default_ports=False, environment=dict(DEBUGGING)
        )
        stack = InProcessStack(settings)
        with folder.hold():
            try:
                await stack.start()
                own = Connection(
                    state_dir=folder.path,
                    store_target=stack.targets["store"],
                    algorithm_target=stack.targets["algorithm"],
                    llm_proxy_target=stack.targets["llm_proxy"],
                    token=stack.client_token,
                )
                await train(own, **{**given, "report_dir": report_dir})
            finally:
                await stack.stop()

    if not folder.is_running():
        if folder.database.exists():
            # A killed process left it running.
            EmbeddedPostgres(folder.database).stop()
        shutil.rmtree(folder.path, ignore_errors=True)
    make_private(connection.state_dir.resolve())
    folder.create()
    config: Path = given["config"]
    run_with_agents_in_main_thread(work, folder=config.resolve().parent, log_file=folder.log_file(LOG))


def unhurried(config: TrainConfig) -> TrainConfig:
    """Returns a configuration whose agents run inside the runner, where a debugger reaches them, without a timeout."""
    stages = tuple(
        replace(stage, settings={ROLLOUT_TIMEOUT: MAX_ROLLOUT_S, **stage.settings})
        if stage.algorithm in _WITH_ROLLOUTS
        else stage
        for stage in config.stages
    )
    agent = config.agent
    if agent is None:
        return replace(config, stages=stages)
    if agent.python or agent.grader:
        agent = replace(agent, isolation="trusted")
    if agent.python:
        agent = replace(agent, limits=LimitsConfig())
    return replace(config, agent=agent, stages=stages)
