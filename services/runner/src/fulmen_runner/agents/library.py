"""Fetches specifications, bundles, prompts and secrets from the store."""

from collections import OrderedDict
from dataclasses import replace

from google.protobuf.message import DecodeError

from fulmen.errors import ArgumentInvalid, FulmenError, ResourceNotFound, SecretNotFound
from fulmen.rpc.channel import FulmenChannel
from fulmen.rpc.resource_contents import read_resources
from fulmen.runner.v1 import agent_spec_pb2 as pb
from fulmen.store.v1 import (
    resource_service_pb2_grpc,
    secret_service_pb2,
    secret_service_pb2_grpc,
)
from fulmen.store.v1.resource_pb2 import ResourceVersion
from fulmen_runner.agents.environment import prompts_text
from fulmen_runner.agents.specification import (
    Bundle,
    CommandTarget,
    ContainerTarget,
    Entry,
    GraderEntry,
    JobTarget,
    JudgeTarget,
    Limits,
    PythonTarget,
    Specification,
    VenvSource,
)
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.errors import AgentFailed, ProgramUnavailable
from fulmen_service_kit.isolation.levels import Isolation

FETCH_TIMEOUT_S = 30.0
PROMPT_PREFIX = "resources/prompt."
PROMPTS_KEPT = 256
MAX_PROMPTS_BYTES = 127 * 1024
"""Maximum size of an attempt's prompts as JSON: Linux allows 128 KiB per environment variable, including its name."""


class StoreLibrary:
    """The library of the store's resources."""

    def __init__(self, channel: FulmenChannel) -> None:
        self._prompts: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._stub = resource_service_pb2_grpc.ResourceServiceStub(channel)
        self._secrets = secret_service_pb2_grpc.SecretServiceStub(channel)

    async def specification(self, name: str, project: str) -> Specification:
        """Returns a version of an agent.

        Raises:
            AgentFailed: If it does not exist or is malformed.
            ProgramUnavailable: If the store cannot be reached.
        """
        resource = await self._fetch(name, project)
        try:
            spec = pb.AgentSpec.FromString(resource.content)
        except DecodeError:
            raise AgentFailed(f"{name} is not an agent specification") from None
        return specification_of(spec, name)

    async def bundle(self, name: str, project: str) -> Bundle:
        """Returns a version of a bundle.

        Raises:
            AgentFailed: If it does not exist.
            ProgramUnavailable: If the store cannot be reached.
        """
        resource = await self._fetch(name, project)
        return Bundle(archive=resource.content, sha256_hex=resource.sha256.hex())

    async def prompts(self, assignment: Assignment) -> dict[str, str]:
        """Returns the texts of an attempt's prompts by name: its resources whose id begins with `prompt.`.

        Versions are immutable and cached.

        Raises:
            AgentFailed: If a prompt does not exist or is not UTF-8, or the prompts exceed `MAX_PROMPTS_BYTES`.
            ProgramUnavailable: If the store cannot be reached.
        """
        found: dict[str, str] = {}
        for name, version in assignment.resource_versions.items():
            if not version.startswith(PROMPT_PREFIX):
                continue
            key = (assignment.project, version)
            if key not in self._prompts:
                content = (await self._fetch(version, assignment.project)).content
                if len(content) > MAX_PROMPTS_BYTES:  # Do not cache it: a resource may be far larger.
                    raise _prompts_too_large()
                try:
                    self._prompts[key] = content.decode()
                except UnicodeDecodeError:
                    raise AgentFailed(f"{version} is not UTF-8") from None
            self._prompts.move_to_end(key)
            found[name] = self._prompts[key]
        while len(self._prompts) > PROMPTS_KEPT:
            self._prompts.popitem(last=False)
        if found and len(prompts_text(found).encode()) > MAX_PROMPTS_BYTES:
            raise _prompts_too_large()
        return found

    async def secrets(self, assignment: Assignment) -> dict[str, str]:
        """Returns the secrets that an attempt's agent names, by variable. They are never cached.

        Raises:
            AgentFailed: If any does not exist.
            ProgramUnavailable: If the store cannot be reached, or the lease is lost.
        """
        request = secret_service_pb2.GetAttemptSecretsRequest(attempt=assignment.attempt, lease_id=assignment.lease_id)
        try:
            answer = await self._secrets.GetAttemptSecrets(request, timeout=FETCH_TIMEOUT_S)
        except SecretNotFound as error:
            names = error.metadata.get("secrets", "").replace(",", ", ")
            raise AgentFailed(
                f"agent needs secrets that do not exist: {names}. Run `fulmen secret set NAME`."
            ) from None
        except FulmenError as error:
            raise ProgramUnavailable(f"fetching the secrets of the agent failed: {error.message}") from None
        return {name: value.decode(errors="replace") for name, value in answer.values.items()}

    async def _fetch(self, name: str, project: str) -> ResourceVersion:
        try:
            (version,) = await read_resources(self._stub, [name], project=project, timeout=FETCH_TIMEOUT_S)
        except (ResourceNotFound, ArgumentInvalid) as error:
            raise AgentFailed(f"{name} cannot be fetched: {error}") from None
        except FulmenError as error:
            raise ProgramUnavailable(f"fetching {name} failed: {error.message}") from None
        return version


def _prompts_too_large() -> AgentFailed:
    return AgentFailed(f"prompts of the rollout exceed {MAX_PROMPTS_BYTES} bytes as JSON")


def specification_of(spec: pb.AgentSpec, name: str) -> Specification:
    """Decodes an agent's specification; `name` is used in errors.

    Raises:
        AgentFailed: If it has no entry, or an empty virtual environment.
    """
    entry = _entry(spec)
    if entry is None:
        raise AgentFailed(f"{name} has no entry: it does not define how the agent is started")
    limits = Limits(
        memory_bytes=spec.limits.memory_bytes,
        cpu_count=spec.limits.cpu_count,
        process_count=spec.limits.process_count,
    )
    return Specification(
        bundle=spec.bundle,
        entry=entry,
        grader=_grader(spec.grader),
        environment=dict(spec.environment),
        limits=limits,
        secrets=tuple(spec.secrets),
        venv=_venv(spec.virtual_environment) if spec.HasField("virtual_environment") else None,
    )


def _venv(environment: pb.VirtualEnvironment) -> VenvSource:
    if environment.WhichOneof("source") is None:
        raise AgentFailed("virtual_environment of the agent has neither `requirements` nor `folder`")
    return VenvSource(requirements=environment.requirements, folder=environment.folder)


def _entry(spec: pb.AgentSpec) -> Entry | None:
    match spec.WhichOneof("entry"):
        case "python":
            return _python(spec.python)
        case "command":
            return _command(spec.command)
        case "container":
            entry = spec.container
            return ContainerTarget(
                image=entry.image,
                argv=tuple(entry.argv),
                output_kept_bytes=entry.max_output_bytes,
                network=entry.network,
            )
        case "job":
            return JobTarget(template=spec.job.template, output_kept_bytes=spec.job.max_output_bytes)
        case _:
            return None


def _grader(grader: pb.Grader) -> GraderEntry | None:
    match grader.WhichOneof("entry"):
        case "python":
            return _python(grader.python)
        case "command":
            return _command(grader.command)
        case "judge":
            return _judge(grader.judge)
        case _:
            return None


def _python(entry: pb.PythonEntry) -> PythonTarget:
    return PythonTarget(target=entry.target, isolation=_isolation(entry.isolation))


def _isolation(value: int) -> Isolation | None:
    match value:
        case pb.ISOLATION_UNSPECIFIED:
            return None
        case pb.ISOLATION_TRUSTED:
            return Isolation.TRUSTED
        case pb.ISOLATION_PROCESS:
            return Isolation.PROCESS
        case _:
            # By the contract, a value unknown to this version is the highest known one.
            return Isolation.SANDBOX


def _command(entry: pb.CommandEntry) -> CommandTarget:
    return CommandTarget(
        argv=tuple(entry.argv),
        output_kept_bytes=entry.max_output_bytes,
        isolation=_isolation(entry.isolation),
    )


def _judge(entry: pb.JudgeEntry) -> JudgeTarget:
    judge = JudgeTarget(
        model=entry.model, prompt=entry.prompt, sample_count=entry.sample_count or 1, min_score=entry.min_score
    )
    if entry.dimensions:
        judge = replace(judge, dimensions=tuple(entry.dimensions))
    return replace(judge, max_score=entry.max_score) if entry.HasField("max_score") else judge
