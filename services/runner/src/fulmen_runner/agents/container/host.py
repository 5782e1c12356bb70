"""Agents that are containers of a Docker engine.

Invariant: a container has only the configured capabilities, cannot gain privileges, has limits of memory, processors and
processes, inherits an allow-list of the runner's environment, and has the files of its own attempt only.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any

from fulmen.agent import WORK_DIR_VARIABLE
from fulmen.attempt_files import REWARDS_FILE_VARIABLE
from fulmen.ids import parse_rollout_name
from fulmen_runner.agents.container.order import (
    BUNDLE_DIR,
    REWARDS_FILE,
    ROOT,
    TASK_FILE,
    WORK_DIR,
    ContainerEnd,
    ContainerOrder,
    PullPolicy,
    attempt_archive,
    bundle_archive,
)
from fulmen_runner.agents.environment import QUIET, Endpoints, network_environment
from fulmen_runner.agents.python.threads import run_in_thread
from fulmen_runner.agents.rewards_file import read_rewards
from fulmen_runner.agents.specification import ContainerTarget, Limits, check_output_limit
from fulmen_runner.agents.templates import expand, expanded_variables, placeholders_of
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import MAX_OUTPUT_BYTES
from fulmen_runner.attempts.program import Answer, Invocation
from fulmen_runner.attempts.rewards import rewards_of_last_line
from fulmen_service_kit.ownership import Owner, deadline_of

if TYPE_CHECKING:
    from fulmen_runner.agents.container.docker_engine import DockerEngine

ATTEMPT_LABEL = "fulmen.attempt"
HOST_LABEL = "fulmen.runner.host"
PROCESS_LABEL = "fulmen.runner.process"
DEADLINE_LABEL = "fulmen.deadline"

OVERTIME_S = 120.0
"""Time after the attempt's timeout when any runner may remove the container."""

NETWORK_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")
"""Network variables that containers inherit from the runner."""

MAX_REWARDS_BYTES = 1024 * 1024
_SIGNALLED = 128
_TEMPORARY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerHost:
    """Configuration shared by all containers of a runner.

    Attributes:
        engine: The Docker engine.
        owner: This runner, for labels.
        endpoints: Model proxy and store as seen by containers.
        inherited: Variables inherited from the runner.
        networks: Allowed networks; the first is the default.
        pull: When images are pulled.
        capabilities: Capabilities that are not dropped.
        read_only: Whether containers can write only to `{work_dir}` and `/tmp`.
        limits: Default and upper bound of an agent's limits.
        output_allowed_bytes: Output above which a container is killed.
    """

    engine: "DockerEngine"
    owner: Owner
    endpoints: Endpoints
    inherited: Mapping[str, str]
    networks: Sequence[str]
    pull: PullPolicy
    capabilities: Sequence[str]
    read_only: bool
    limits: Limits
    output_allowed_bytes: int

    async def agent(
        self,
        target: ContainerTarget,
        directory: Path | None,
        *,
        environment: Mapping[str, str],
        limits: Limits,
        graded: bool,
    ) -> "ContainerAgent":
        """Prepares an agent: pulls its image and packs its files.

        Args:
            target: The specification's entry.
            directory: The unpacked bundle, if it has one.
            environment: The specification's variables, templates.
            limits: The specification's limits.
            graded: Whether a grader scores it.

        Raises:
            AgentFailed: If the specification is invalid for this runner.
            HostUnavailable: If the engine or the registry does not answer.
        """
        if not target.image:
            raise AgentFailed("container of the agent has no image")
        check_output_limit(target.output_kept_bytes)
        if target.network and target.network not in self.networks:
            raise AgentFailed(
                f"network {target.network!r} is not allowed on this runner; allowed are {', '.join(self.networks)} "
                "(FULMEN_RUNNER_CONTAINER_NETWORKS)"
            )
        await self.engine.provide_image(target.image, self.pull)
        bundle = await run_in_thread(bundle_archive, directory) if directory is not None else None
        return ContainerAgent(
            host=self,
            target=target,
            bundle=bundle,
            environment=environment,
            limits=limits.capped(self.limits),
            graded=graded,
        )

    async def remove_leftovers(self, now_unix_s: float) -> int:
        """Removes containers of dead runners; returns their number. Raises HostUnavailable."""
        return await self.engine.remove_leftovers(
            ATTEMPT_LABEL,
            lambda labels: self.owner.is_leftover(
                host=labels.get(HOST_LABEL, ""),
                process=labels.get(PROCESS_LABEL, ""),
                deadline_unix_s=deadline_of(labels, DEADLINE_LABEL),
                now_unix_s=now_unix_s,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAgent:
    """An agent that is a container. Outcome and rewards are read as for a command."""

    host: ContainerHost
    target: ContainerTarget
    bundle: Path | None
    environment: Mapping[str, str] = field(repr=False)
    limits: Limits
    graded: bool

    async def run(self, invocation: Invocation) -> Answer:
        """Runs the container on the rollout's input."""
        order = self._order(invocation)
        # It may have been removed since the agent was prepared.
        await self.host.engine.provide_image(self.target.image, "never" if self.host.pull == "never" else "missing")
        end = await self.host.engine.run(order)
        self._check(end)
        output = end.stdout.rstrip("\r\n")
        if end.result_cut:
            raise AgentFailed(f"rewards file exceeds {MAX_REWARDS_BYTES} bytes")
        _emit(invocation, end.result)
        return Answer(value=output, rewards=() if self.graded else rewards_of_last_line(output))

    def _order(self, invocation: Invocation) -> ContainerOrder:
        assignment = invocation.assignment
        files: list[bytes | Path] = [] if self.bundle is None else [self.bundle]
        return ContainerOrder(
            name=f"fulmen-{parse_rollout_name(assignment.rollout).rollout_id}-{assignment.number}-{assignment.epoch}",
            config=self._config(invocation),
            files=[*files, attempt_archive(assignment.input)],
            files_at=ROOT,
            stdin=assignment.input,
            result_path=REWARDS_FILE,
            output_kept_bytes=self.target.output_kept_bytes or MAX_OUTPUT_BYTES,
            output_allowed_bytes=self.host.output_allowed_bytes,
            result_allowed_bytes=MAX_REWARDS_BYTES,
            printed=invocation.kept_tails,
        )

    def _config(self, invocation: Invocation) -> dict[str, Any]:
        """Returns the body of the `ContainerCreate` request (Docker Engine API 1.41)."""
        assignment, host = invocation.assignment, self.host
        placeholders = placeholders_of(invocation, task_file=TASK_FILE, work_dir=WORK_DIR)
        arguments = {f"argument {number}": argument for number, argument in enumerate(self.target.argv)}
        argv = list(expand(arguments, placeholders).values())
        variables = {
            **host.inherited,
            **expanded_variables(self.environment, placeholders),
            **host.endpoints.attempt_environment(assignment),
            WORK_DIR_VARIABLE: WORK_DIR,
            REWARDS_FILE_VARIABLE: REWARDS_FILE,
        }
        config: dict[str, Any] = {
            "Image": self.target.image,
            "Env": [f"{name}={value}" for name, value in variables.items()],
            "Labels": {
                ATTEMPT_LABEL: assignment.attempt,
                HOST_LABEL: host.owner.host,
                PROCESS_LABEL: host.owner.process,
                DEADLINE_LABEL: str(int(time.time() + assignment.timeout_s + OVERTIME_S)),
            },
            "AttachStdin": True,
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Volumes": {ROOT: {}},
            "HostConfig": self._host_config(),
        }
        if argv:
            config["Cmd"] = argv
        if self.bundle is not None:
            config["WorkingDir"] = BUNDLE_DIR
        return config

    def _host_config(self) -> dict[str, Any]:
        host, limits = self.host, self.limits
        return {
            "NetworkMode": self.target.network or host.networks[0],
            "Init": True,
            "CapDrop": ["ALL"],
            "CapAdd": list(host.capabilities),
            "SecurityOpt": ["no-new-privileges"],
            "Memory": limits.memory_bytes,
            # Memory plus swap: no swap.
            "MemorySwap": limits.memory_bytes,
            "NanoCpus": int(limits.cpu_count * 1e9),
            "PidsLimit": limits.process_count,
            "ReadonlyRootfs": host.read_only,
            "Tmpfs": {"/tmp": f"size={_TEMPORARY_BYTES}"} if host.read_only else {},  # noqa: S108  # The container's.
            "LogConfig": {"Type": "none"},
            "RestartPolicy": {"Name": "no"},
        }

    def _check(self, end: ContainerEnd) -> None:
        if end.flooded:
            raise AgentFailed(
                f"container exceeded the output limit of {self.host.output_allowed_bytes} bytes "
                "(FULMEN_RUNNER_MAX_COMMAND_OUTPUT_BYTES) and was killed"
            )
        if end.out_of_memory:
            raise AgentFailed(
                f"container exceeded its memory limit of {self.limits.memory_bytes} bytes and was killed\n"
                f"{end.stderr}".rstrip()
            )
        if end.exit_code > _SIGNALLED:
            number, limit = end.exit_code - _SIGNALLED, self.limits.memory_bytes
            # The engine may learn of a lack of memory later than of the exit, or never.
            likely = (
                f", probably for exceeding its memory limit of {limit} bytes" if number == SIGKILL and limit else ""
            )
            raise AgentFailed(f"container was killed by signal {number}{likely}\n{end.stderr}".rstrip())
        if end.exit_code:
            raise AgentFailed(f"container exited with status {end.exit_code}\n{end.stderr}".rstrip())


def container_environment(
    extra: Sequence[str], endpoints: Endpoints, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the variables that containers inherit: of the network, to disable frameworks' telemetry, and `extra`."""
    names = (*NETWORK_VARIABLES, *QUIET, *extra)
    found = {name: environ[name] for name in names if name in environ}
    return QUIET | found | network_environment(endpoints, environ)


def _emit(invocation: Invocation, content: bytes) -> None:
    """Adds the rewards of the container's rewards file to the context."""
    found = read_rewards(content)
    invocation.context.rewards.update({(each.dimension, each.step, each.span_id): each.value for each in found})
