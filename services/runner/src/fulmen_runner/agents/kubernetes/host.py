"""Agents that are Jobs of a Kubernetes cluster.

Invariant: a Secret belongs to its Job. When an attempt ends, its Job is deleted, and the Secret with it. If the runner dies, the Job ends at its own deadline, and
the cluster or another runner deletes it.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from fulmen.agent import WORK_DIR_VARIABLE
from fulmen.ids import parse_rollout_name
from fulmen_runner.agents.environment import QUIET, Endpoints
from fulmen_runner.agents.kubernetes.manifest import (
    DEADLINE_ANNOTATION,
    HOST_ANNOTATION,
    MANAGER,
    MAX_INPUT_BYTES,
    PROCESS_ANNOTATION,
    TASK_FILE,
    WORK_DIR,
    JobOrder,
    job_of,
    secret_of,
)
from fulmen_runner.agents.kubernetes.template import JobTemplate, read_template
from fulmen_runner.agents.kubernetes.verdict import (
    DeadlineExceeded,
    Ended,
    Lost,
    Patience,
    Refused,
    Verdict,
    verdict_of,
    waiting_for,
)
from fulmen_runner.agents.python.threads import run_in_thread
from fulmen_runner.agents.specification import JobTarget, Limits, check_output_limit
from fulmen_runner.agents.tail import Tail
from fulmen_runner.agents.templates import expanded_variables, placeholders_of
from fulmen_runner.attempts.errors import AgentFailed, AgentTimedOut, HostUnavailable
from fulmen_runner.attempts.outcome import MAX_OUTPUT_BYTES
from fulmen_runner.attempts.printed import PrintedTails
from fulmen_runner.attempts.program import Answer, Invocation
from fulmen_runner.attempts.rewards import rewards_of_last_line
from fulmen_service_kit.kubernetes.documents import MANAGED_BY
from fulmen_service_kit.kubernetes.errors import DocumentRejected, KubernetesError
from fulmen_service_kit.ownership import Owner, deadline_of

if TYPE_CHECKING:
    from fulmen_service_kit.kubernetes.client import KubernetesCluster

POLL_INTERVAL_S = 20.0
"""Interval of polling a Job while its pods do not change."""

UNREACHABLE_S = 60.0
"""Time without an answer of the cluster after which an attempt fails."""

RETRY_PAUSE_S = 1.0
REMOVE_TIMEOUT_S = 60.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHost:
    """Configuration shared by all Jobs of a runner.

    Attributes:
        cluster: The cluster.
        owner: This runner, for annotations.
        endpoints: Model proxy and store as seen by pods.
        host_access: Whether templates may use the nodes, and Secrets and service accounts of the namespace.
        limits: Default and upper bound of an agent's limits.
        patience: Timeouts for starting a pod.
        ttl_s: Time after which the cluster deletes ended Jobs, in seconds.
        output_allowed_bytes: Size of the log above which an attempt fails.
        removals: Pending deletions.
    """

    cluster: "KubernetesCluster"
    owner: Owner
    endpoints: Endpoints
    host_access: bool
    limits: Limits
    patience: Patience
    ttl_s: int
    output_allowed_bytes: int
    removals: "set[asyncio.Task[None]]" = field(default_factory=set)

    async def agent(
        self,
        target: JobTarget,
        directory: Path | None,
        *,
        environment: Mapping[str, str],
        limits: Limits,
        graded: bool,
    ) -> "JobAgent":
        """Prepares an agent: parses and checks its template.

        Args:
            target: The specification's entry.
            directory: The unpacked bundle, if it has one.
            environment: The specification's variables, templates.
            limits: The specification's limits.
            graded: Whether a grader scores it.

        Raises:
            AgentFailed: If the template is invalid; lists all problems.
        """
        check_output_limit(target.output_kept_bytes)
        if directory is not None and not graded:
            raise AgentFailed("a Job cannot use the agent's bundle. Put its files into the image.")
        template = await run_in_thread(
            partial(read_template, target.template, host_access=self.host_access, max_limits=self.limits)
        )
        return JobAgent(
            host=self, target=target, template=template, environment=environment, limits=limits, graded=graded
        )

    async def remove(self, name: str) -> None:
        """Deletes a Job and with it its Secret; on timeout, leaves them to the cluster and to `remove_leftovers`."""
        problem = "timeout"
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S):
                while True:
                    try:
                        await self.cluster.delete_job(name)
                    except KubernetesError as error:
                        problem = str(error)
                        await asyncio.sleep(RETRY_PAUSE_S)
                    else:
                        return
        except TimeoutError:
            _log.warning("job_not_removed", job=name, error=problem)

    async def remove_leftovers(self, now_unix_s: float) -> int:
        """Deletes Jobs of dead runners; returns their number. Raises HostUnavailable."""
        with _told_as_outcomes():
            found = await self.cluster.jobs(f"{MANAGED_BY}={MANAGER}")
        names = [each["metadata"]["name"] for each in found if self._is_leftover(each, now_unix_s)]
        for name in names:
            await self.remove(name)
        return len(names)

    async def close(self) -> None:
        """Waits for pending deletions and closes the connections."""
        if self.removals:
            await asyncio.wait(self.removals, timeout=REMOVE_TIMEOUT_S)
        await self.cluster.close()

    def _is_leftover(self, document: Mapping[str, Any], now_unix_s: float) -> bool:
        annotations = document["metadata"].get("annotations") or {}
        return self.owner.is_leftover(
            host=annotations.get(HOST_ANNOTATION, ""),
            process=annotations.get(PROCESS_ANNOTATION, ""),
            deadline_unix_s=deadline_of(annotations, DEADLINE_ANNOTATION),
            now_unix_s=now_unix_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAgent:
    """An agent that is a Job. Its outcome is its log; without a grader, its reward is in the last line."""

    host: JobHost
    target: JobTarget
    template: JobTemplate
    environment: Mapping[str, str] = field(repr=False)
    limits: Limits
    graded: bool

    async def run(self, invocation: Invocation) -> Answer:
        """Runs the Job on the rollout's input."""
        assignment = invocation.assignment
        if len(assignment.input) + sum(map(len, assignment.secrets.values())) > MAX_INPUT_BYTES:
            raise AgentFailed(f"input and secrets of the rollout exceed the {MAX_INPUT_BYTES} bytes allowed for a Job")
        placeholders = placeholders_of(invocation, task_file=TASK_FILE, work_dir=WORK_DIR)
        order = self._order(invocation, expanded_variables(self.environment, placeholders))
        job = job_of(self.template, placeholders, order)
        try:
            # The Secret belongs to the Job from the start, and is deleted with it: a runner only needs permission to
            # create one.
            with _told_as_outcomes():
                made = await self.host.cluster.create_job(job)
                await self.host.cluster.create_secret(secret_of(order, made))
                await self.host.cluster.resume_job(order.name)
                output = await self._output(await self._end(order.name), invocation.kept_tails)
        finally:
            removal = asyncio.create_task(self.host.remove(order.name), name=f"remove {order.name}")
            self.host.removals.add(removal)
            removal.add_done_callback(self.host.removals.discard)
            await asyncio.shield(removal)
        return Answer(value=output, rewards=() if self.graded else rewards_of_last_line(output))

    def _order(self, invocation: Invocation, environment: Mapping[str, str]) -> JobOrder:
        assignment, host = invocation.assignment, self.host
        rollout_id = str(parse_rollout_name(assignment.rollout).rollout_id)
        return JobOrder(
            name=f"fulmen-{rollout_id}-{assignment.number}-{assignment.epoch}",
            rollout_id=rollout_id,
            attempt=assignment.attempt,
            owner=host.owner,
            variables={**environment, **host.endpoints.attempt_environment(assignment), WORK_DIR_VARIABLE: WORK_DIR},
            defaults=QUIET,
            input=assignment.input,
            timeout_s=assignment.timeout_s,
            ttl_s=host.ttl_s,
            limits=self.limits.capped(host.limits),
            requested_limits=self.limits,
            created_unix_s=time.time(),
        )

    async def _end(self, name: str) -> Verdict:
        """Waits for the end of the Job; the executor applies the attempt's timeout."""
        cluster, patience = self.host.cluster, self.host.patience
        poll_s = min(POLL_INTERVAL_S, patience.image_s, patience.start_s)
        answered_at = seen_at = time.monotonic()
        seen = ""
        while True:
            try:
                pods = await cluster.pods(name)
                job = await cluster.job(name)
                now = answered_at = time.monotonic()
                if (waiting := waiting_for(pods.items)) != seen:
                    seen, seen_at = waiting, now
                verdict = verdict_of(job, pods.items, waited_s=now - seen_at, patience=patience)
                if verdict is not None:
                    return verdict
                await cluster.pods_changed(name, pods.version, poll_s)
            except KubernetesError:
                if time.monotonic() - answered_at > UNREACHABLE_S:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _output(self, verdict: Verdict, printed: PrintedTails) -> str:
        match verdict:
            case Refused(message=message):
                raise AgentFailed(message)
            case DeadlineExceeded(message=message):
                raise AgentTimedOut(message)
            case Lost(message=message):
                raise HostUnavailable(message)
            case Ended(pod=pod, problem=problem):
                log = await self._log(pod)
                # A pod has one log, of both streams.
                printed.keep(log.encode(), b"")
                if problem:
                    raise AgentFailed(f"{problem}\n{log}".rstrip())
                return log.rstrip("\r\n")

    async def _log(self, pod: str) -> str:
        tail = Tail(self.target.output_kept_bytes or MAX_OUTPUT_BYTES)
        container = self.template.manifest["spec"]["template"]["spec"]["containers"][self.template.agent_index]["name"]
        allowed_bytes = self.host.output_allowed_bytes
        async with aclosing(self.host.cluster.log(pod, container)) as chunks:
            async for chunk in chunks:
                tail.add(chunk)
                if tail.seen_bytes > allowed_bytes:
                    raise AgentFailed(f"log of the agent exceeds {allowed_bytes} bytes")
        return tail.text()


@contextmanager
def _told_as_outcomes() -> Iterator[None]:
    """Raises errors of the cluster as errors of an attempt."""
    try:
        yield
    except DocumentRejected as error:
        raise AgentFailed(f"cluster rejected the agent's Job: {error.reason}") from None
    except KubernetesError as error:
        raise HostUnavailable(str(error)) from None
