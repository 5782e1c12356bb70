"""Agents that are containers of a Docker engine.

Invariant: a container has no capability, no way to new privileges, limits of memory, processors and processes, nothing
of the runner's environment but an allow-list, and files only of its own attempt.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen.agent import WORK_DIR_VARIABLE
from fulmen.rewards_file import REWARDS_FILE_VARIABLE
from fulmen_runner.agents.container.files import (
    BUNDLE_DIR,
    REWARDS_FILE,
    ROOT,
    TASK_FILE,
    WORK_DIR,
    attempt_archive,
    bundle_archive,
)
from fulmen_runner.agents.container.order import ContainerEnd, ContainerOrder, PullPolicy
from fulmen_runner.agents.environment import QUIET, Endpoints, network_environment
from fulmen_runner.agents.limits_granted import granted
from fulmen_runner.agents.ownership import Owner, deadline_of
from fulmen_runner.agents.python.threads import run_in_thread
from fulmen_runner.agents.rewards_file import read_rewards
from fulmen_runner.agents.specification import ContainerTarget, Limits
from fulmen_runner.agents.templates import expand, expanded_variables, placeholders_of
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import MAX_OUTPUT_BYTES
from fulmen_runner.attempts.program import Answer, Invocation
from fulmen_runner.attempts.rewards import rewards_of_last_line

if TYPE_CHECKING:
    from fulmen_runner.agents.container.docker_engine import DockerEngine

ATTEMPT_LABEL = "fulmen.attempt"
HOST_LABEL = "fulmen.runner.host"
PROCESS_LABEL = "fulmen.runner.process"
DEADLINE_LABEL = "fulmen.deadline"

OVERTIME_S = 120.0
"""How long after its attempt's time a container may be there before any runner removes it."""

NETWORK_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY", "https_proxy", "http_proxy", "no_proxy")
"""Variables of the runner that containers get: how to reach the network."""

MAX_REWARDS_BYTES = 1024 * 1024
_SIGNALLED = 128
_TEMPORARY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerHost:
    """What all containers of a runner share.

    Attributes:
        endpoints: The model proxy and the store, as containers reach them.
        inherited: Variables of the runner that containers get.
        networks: Those that agents may ask for; the first is the one of agents that do not.
        pull: When images are pulled.
        capabilities: What is not dropped.
        read_only: Whether containers can write to nothing but `{work_dir}` and `/tmp`.
        limits: Of agents that ask for none, and the most that one gets.
        output_allowed_bytes: A container that writes more is killed.
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
        """Makes an agent ready: its image is there, its files are packed.

        Args:
            target: What its publisher wrote.
            directory: The unpacked bundle, if it has one.
            environment: Its publisher's variables, templates.
            limits: What it asks for.
            graded: Whether something else scores it.

        Raises:
            AgentFailed: If it cannot be run for what it is.
            HostUnavailable: If the engine or the registry does not answer.
        """
        if not target.image:
            raise AgentFailed("The agent's container names no image.")
        if not 0 <= target.output_kept_bytes <= MAX_OUTPUT_BYTES:
            raise AgentFailed(f"max_output_bytes must lie in 1 to {MAX_OUTPUT_BYTES}.")
        if target.network and target.network not in self.networks:
            raise AgentFailed(
                f"The agent asks for the network {target.network!r}, which this runner does not give to containers. "
                f"Those it gives, {', '.join(self.networks)}, are named in FULMEN_RUNNER_CONTAINER_NETWORKS."
            )
        await self.engine.provide_image(target.image, self.pull)
        bundle = await run_in_thread(bundle_archive, directory) if directory is not None else None
        return ContainerAgent(
            host=self,
            target=target,
            bundle=bundle,
            environment=environment,
            limits=granted(limits, self.limits),
            graded=graded,
        )

    async def remove_left(self, now_unix_s: float) -> int:
        """Removes containers that runners left behind; returns how many. Raises HostUnavailable."""
        return await self.engine.remove_left(
            ATTEMPT_LABEL,
            lambda labels: self.owner.left(
                host=labels.get(HOST_LABEL, ""),
                process=labels.get(PROCESS_LABEL, ""),
                deadline_unix_s=deadline_of(labels, DEADLINE_LABEL),
                now_unix_s=now_unix_s,
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerAgent:
    """An agent that is a container: its outcome is what it prints, its rewards are as those of a command."""

    host: ContainerHost
    target: ContainerTarget
    bundle: Path | None
    environment: Mapping[str, str] = field(repr=False)
    limits: Limits
    graded: bool

    async def run(self, invocation: Invocation) -> Answer:
        """Runs the container on the rollout's input."""
        order = self._order(invocation)
        # It may have been removed since the agent was made ready.
        await self.host.engine.provide_image(self.target.image, "never" if self.host.pull == "never" else "missing")
        end = await self.host.engine.run(order)
        self._check(end)
        output = end.stdout.rstrip("\r\n")
        if end.result_cut:
            raise AgentFailed(f"The file of rewards is larger than {MAX_REWARDS_BYTES} bytes.")
        _emit(invocation, end.result)
        return Answer(value=output, rewards=() if self.graded else rewards_of_last_line(output))

    def _order(self, invocation: Invocation) -> ContainerOrder:
        assignment = invocation.assignment
        files: list[bytes | Path] = [] if self.bundle is None else [self.bundle]
        return ContainerOrder(
            name=f"fulmen-{assignment.rollout.rpartition('/')[2]}-{assignment.number}-{assignment.epoch}",
            config=self._config(invocation),
            files=[*files, attempt_archive(assignment.input)],
            files_at=ROOT,
            stdin=assignment.input,
            result_path=REWARDS_FILE,
            output_kept_bytes=self.target.output_kept_bytes or MAX_OUTPUT_BYTES,
            output_allowed_bytes=self.host.output_allowed_bytes,
            result_allowed_bytes=MAX_REWARDS_BYTES,
        )

    def _config(self, invocation: Invocation) -> dict[str, Any]:
        """Returns the container as the engine's API takes it (Docker Engine API 1.41, `ContainerCreate`)."""
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
            # Together with the memory itself: no swap.
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
            raise AgentFailed(f"The container wrote more than {self.host.output_allowed_bytes} bytes and was killed.")
        if end.out_of_memory:
            raise AgentFailed(
                f"The container took more than its {self.limits.memory_bytes} bytes of memory and was killed.\n"
                f"{end.stderr}".rstrip()
            )
        if end.exit_code > _SIGNALLED:
            raise AgentFailed(f"The container was ended by signal {end.exit_code - _SIGNALLED}.\n{end.stderr}".rstrip())
        if end.exit_code:
            raise AgentFailed(f"The container exited with status {end.exit_code}.\n{end.stderr}".rstrip())


def container_environment(
    extra: Sequence[str], endpoints: Endpoints, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the variables of the runner that containers get: those of the network, what keeps frameworks quiet, and
    `extra`.
    """
    names = (*NETWORK_VARIABLES, *QUIET, *extra)
    found = {name: environ[name] for name in names if name in environ}
    return QUIET | found | network_environment(endpoints, environ)


def _emit(invocation: Invocation, statements: bytes) -> None:
    """Takes over what the container wrote to its file of rewards."""
    found = read_rewards(statements)
    invocation.context.rewards.update({(each.dimension, each.step, each.span_id): each.value for each in found})
