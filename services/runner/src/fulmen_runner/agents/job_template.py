"""Reads and checks templates of Kubernetes Jobs.

Invariant: a template that is read here is plain data of bounded size, names one container as the agent, and, unless the
runner allows it, asks for nothing of the node that it runs on. What else is wrong with it the cluster says.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fulmen_runner.agents.quantities import quantity
from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.templates import Placeholders, expand
from fulmen_runner.domain.errors import AgentFailed

MAX_TEMPLATE_BYTES = 64 * 1024
AGENT_CONTAINER = "agent"

_MAX_DEPTH = 100

_POD_SWITCHES = ("hostNetwork", "hostPID", "hostIPC")
_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
_OWN_FIELDS = ("selector", "manualSelector", "suspend", "managedBy")
_ALLOW = "which this runner does not allow (FULMEN_RUNNER_JOB_HOST_ACCESS)"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTemplate:
    """A checked template.

    Attributes:
        manifest: The Job as data; its texts are templates.
        agent_index: Which of its containers is the agent.
    """

    manifest: Mapping[str, Any] = field(repr=False)
    agent_index: int

    def filled(self, placeholders: Placeholders) -> dict[str, Any]:
        """Returns the Job of one attempt, each of its texts expanded; what an input holds stays inside its text.

        Raises:
            AgentFailed: If the texts do not fit the input.
        """
        manifest = copy.deepcopy(dict(self.manifest))
        places = dict(_texts(manifest))
        expanded = expand({path: text for path, (text, _) in places.items()}, placeholders)
        for path, text in expanded.items():
            places[path][1](text)
        return manifest


def read_template(text: str, *, host_access: bool, most: Limits) -> JobTemplate:
    """Reads a template.

    Args:
        text: YAML or JSON.
        host_access: Whether it may use the node.
        most: What its agent may ask for.

    Raises:
        AgentFailed: With everything that is wrong with it.
    """
    manifest, problems = _parsed(text)
    index = 0
    if not problems:
        problems += _job_problems(manifest)
        index, found = _agent_index(manifest)
        problems += found
        if not host_access:
            problems += _host_problems(_pod(manifest))
        if not found:
            problems += _limit_problems(_pod(manifest)["containers"][index], most)
    if problems:
        raise AgentFailed("The agent's Job template cannot be used: " + "; ".join(problems) + ".")
    return JobTemplate(manifest=manifest, agent_index=index)


def _parsed(text: str) -> tuple[dict[str, Any], list[str]]:
    # Imported here: a runner without Jobs does without it.
    import yaml  # type: ignore[import-untyped]  # Its types are a package of their own.

    if len(text.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        return {}, [f"it is larger than {MAX_TEMPLATE_BYTES} bytes"]
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            # The time that reading takes grows with the square of the depth.
            if depth > _MAX_DEPTH:
                return {}, ["it is nested too deep"]
            # An alias of an alias may stand for more than any memory holds.
            if isinstance(event, yaml.AliasEvent):
                return {}, ["it uses YAML aliases (`*name`), which are not supported"]
        manifest = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        return {}, ["it is not YAML: " + " ".join(str(error).split())]
    if not isinstance(manifest, dict):
        return {}, ["it is not a single YAML object"]
    return manifest, [f"{path} is neither text, number, list nor object" for path in _not_json(manifest, "")]


def _not_json(value: object, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                yield f"the key {key!r} of {path or 'the Job'}"
            yield from _not_json(member, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _not_json(member, f"{path}[{index}]")
    elif value is not None and not isinstance(value, (str, int, float)):
        yield f"{path}, {value!r},"


def _job_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    for name, wanted in (("apiVersion", "batch/v1"), ("kind", "Job")):
        if manifest.get(name) != wanted:
            yield f"{name} is {manifest.get(name)!r} instead of {wanted!r}"
    if _object(manifest.get("metadata")).get("namespace"):
        yield "metadata.namespace is the runner's to set (FULMEN_RUNNER_JOB_NAMESPACE)"
    spec = _object(manifest.get("spec"))
    for name in ("parallelism", "completions"):
        if spec.get(name, 1) != 1:
            yield f"spec.{name} is {spec[name]!r}: an attempt is one pod"
    for name in _OWN_FIELDS:
        if spec.get(name):
            yield f"spec.{name} cannot be set"
    deadline = spec.get("activeDeadlineSeconds", 1)
    if not isinstance(deadline, int) or deadline < 1:
        yield "spec.activeDeadlineSeconds is no positive number of seconds"


def _agent_index(manifest: Mapping[str, Any]) -> tuple[int, list[str]]:
    containers = _pod(manifest).get("containers")
    where = "spec.template.spec.containers"
    if not isinstance(containers, list) or not containers:
        return 0, [f"{where} names no container"]
    if not all(isinstance(container, dict) for container in containers):
        return 0, [f"{where} holds what is no container"]
    named = [index for index, each in enumerate(containers) if each.get("name") == AGENT_CONTAINER]
    if len(containers) > 1 and len(named) != 1:
        return 0, [f"{where} has {len(containers)} containers, of which one must be called {AGENT_CONTAINER!r}"]
    index = named[0] if named else 0
    problems = [
        f"{where}[{index}].{name} is missing"
        for name in ("name", "image")
        if not isinstance(containers[index].get(name), str)
    ]
    return index, problems


def _host_problems(pod: Mapping[str, Any]) -> Iterator[str]:
    where = "spec.template.spec"
    for name in _POD_SWITCHES:
        if pod.get(name):
            yield f"{where}.{name}, {_ALLOW}"
    for index, volume in enumerate(_objects(pod.get("volumes"))):
        if "hostPath" in volume:
            yield f"{where}.volumes[{index}].hostPath, {_ALLOW}"
    for name in _CONTAINER_LISTS:
        for index, container in enumerate(_objects(pod.get(name))):
            for problem in _container_uses(container):
                yield f"{where}.{name}[{index}].{problem}, {_ALLOW}"


def _container_uses(container: Mapping[str, Any]) -> Iterator[str]:
    security = _object(container.get("securityContext"))
    for name in ("privileged", "allowPrivilegeEscalation"):
        if security.get(name):
            yield f"securityContext.{name}"
    if _object(security.get("capabilities")).get("add"):
        yield "securityContext.capabilities.add"
    if any("hostPort" in port for port in _objects(container.get("ports"))):
        yield "ports.hostPort"
    if container.get("volumeDevices"):
        yield "volumeDevices"


def _limit_problems(agent: Mapping[str, Any], most: Limits) -> Iterator[str]:
    limits = _object(_object(agent.get("resources")).get("limits"))
    for name, highest in (("memory", most.memory_bytes), ("cpu", most.cpu_count)):
        if name not in limits:
            continue
        try:
            asked = quantity(limits[name])
        except ValueError as error:
            yield f"resources.limits.{name} of the agent: {error}"
            continue
        if highest and asked > highest:
            yield f"resources.limits.{name} of the agent is {limits[name]}, more than the {highest:g} that this runner gives"


def _pod(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return _object(_object(_object(manifest.get("spec")).get("template")).get("spec"))


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, tuple[str, Callable[[str], None]]]]:
    """Yields every text in a document with its path and with what replaces it there."""
    members = value.items() if isinstance(value, dict) else enumerate(value)
    for key, member in members:
        below = f"{path}[{key}]" if isinstance(value, list) else f"{path}.{key}".lstrip(".")
        if isinstance(member, str):
            yield below, (member, _setter(value, key))
        elif isinstance(member, (dict, list)):
            yield from _texts(member, below)


def _setter(container: Any, key: Any) -> Callable[[str], None]:
    def replace(text: str) -> None:
        container[key] = text

    return replace
