"""Reads and checks templates of Kubernetes Jobs.

Invariant: a template that is read here is plain data of bounded size, names one container as the agent, and, unless the
runner allows it, asks for nothing of the node that it runs on nor for Secrets and tokens of its namespace. What else is
wrong with it the cluster says.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fulmen_runner.agents.kubernetes.quantities import quantity
from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.templates import Placeholders, expand
from fulmen_runner.attempts.errors import AgentFailed

MAX_TEMPLATE_BYTES = 64 * 1024
AGENT_CONTAINER = "agent"

_MAX_DEPTH = 100

_POD_SWITCHES = ("hostNetwork", "hostPID", "hostIPC", "nodeName")
_POD_IDENTITY = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken")
_SAFE_VOLUMES = frozenset(
    {"name", "emptyDir", "configMap", "downwardAPI", "persistentVolumeClaim", "ephemeral", "image"}
)
"""What a volume may be. Others are of the node, may hold a Secret or a token, or are mounted with the help of one."""

_PROFILES = ("seccompProfile", "appArmorProfile")
_SAFE_PROFILE = "RuntimeDefault"
_PROFILE_ANNOTATIONS = ("seccomp.security.alpha.kubernetes.io/", "container.apparmor.security.beta.kubernetes.io/")
_SAFE_ANNOTATIONS = ("runtime/default", "docker/default")
_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
_OWN_FIELDS = ("selector", "manualSelector", "suspend", "managedBy")
_ALLOW = "which this runner does not allow (FULMEN_RUNNER_JOB_HOST_ACCESS)"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTemplate:
    """A checked template.

    Attributes:
        manifest: The Job as data; its texts are templates.
        agent_index: Which of its containers is the agent.
        host_access: Whether it may say itself what its containers may do.
    """

    manifest: Mapping[str, Any] = field(repr=False)
    agent_index: int
    host_access: bool

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
        host_access: Whether it may use the node, and the Secrets and service accounts of the namespace.
        most: What each of its containers may ask for.

    Raises:
        AgentFailed: With everything that is wrong with it.
    """
    manifest, problems = _parsed(text)
    index = 0
    if not problems:
        problems += _job_problems(manifest)
        index, found = _agent_index(manifest)
        problems += found
        problems += _shape_problems(_pod(manifest))
        if not host_access:
            problems += _host_problems(manifest)
        problems += _limit_problems(_pod(manifest), most)
    if problems:
        raise AgentFailed("The agent's Job template cannot be used: " + "; ".join(problems) + ".")
    return JobTemplate(manifest=manifest, agent_index=index, host_access=host_access)


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


def _shape_problems(pod: Mapping[str, Any]) -> Iterator[str]:
    """Finds what the runner could not complete."""
    where = "spec.template.spec"
    if not isinstance(pod.get("securityContext") or {}, dict):
        yield f"{where}.securityContext is no object"
    for name in ("volumes", *_CONTAINER_LISTS[1:]):
        members = pod.get(name) or []
        if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
            yield f"{where}.{name} is no list of objects"
    for place, container in _containers(pod):
        for name in ("securityContext", "resources"):
            if not isinstance(container.get(name) or {}, dict):
                yield f"{place}.{name} is no object"
        if not isinstance(_object(container.get("resources")).get("limits") or {}, dict):
            yield f"{place}.resources.limits is no object"


def _host_problems(manifest: Mapping[str, Any]) -> Iterator[str]:
    where, pod = "spec.template.spec", _pod(manifest)
    uses = [f"{where}.{name}" for name in (*_POD_SWITCHES, *_POD_IDENTITY) if pod.get(name)]
    for index, volume in enumerate(_objects(pod.get("volumes"))):
        uses += [f"{where}.volumes[{index}].{name}" for name in volume if name not in _SAFE_VOLUMES]
    uses += [f"{where}.securityContext.{use}" for use in _confinement(_object(pod.get("securityContext")))]
    annotations = _object(
        _object(_object(_object(manifest.get("spec")).get("template")).get("metadata")).get("annotations")
    )
    uses += [
        f"spec.template.metadata.annotations[{name}]"
        for name, value in annotations.items()
        if name.startswith(_PROFILE_ANNOTATIONS) and value not in _SAFE_ANNOTATIONS
    ]
    uses += [f"{place}.{use}" for place, container in _containers(pod) for use in _container_uses(container)]
    return (f"{use}, {_ALLOW}" for use in uses)


def _container_uses(container: Mapping[str, Any]) -> Iterator[str]:
    security = _object(container.get("securityContext"))
    for name in ("privileged", "allowPrivilegeEscalation"):
        if security.get(name):
            yield f"securityContext.{name}"
    if _object(security.get("capabilities")).get("add"):
        yield "securityContext.capabilities.add"
    yield from (f"securityContext.{use}" for use in _confinement(security))
    if any("hostPort" in port for port in _objects(container.get("ports"))):
        yield "ports.hostPort"
    if container.get("volumeDevices"):
        yield "volumeDevices"
    for index, variable in enumerate(_objects(container.get("env"))):
        if "secretKeyRef" in _object(variable.get("valueFrom")):
            yield f"env[{index}].valueFrom.secretKeyRef"
    for index, source in enumerate(_objects(container.get("envFrom"))):
        if "secretRef" in source:
            yield f"envFrom[{index}].secretRef"


def _confinement(security: Mapping[str, Any]) -> Iterator[str]:
    """Finds what weakens the walls around a container; a profile of the node may be as weak as none."""
    for name in _PROFILES:
        if name in security and _object(security[name]).get("type") != _SAFE_PROFILE:
            yield f"{name}.type"
    if security.get("procMount") not in (None, "Default"):
        yield "procMount"
    for name in ("seLinuxOptions", "windowsOptions"):
        if security.get(name):
            yield name


def _limit_problems(pod: Mapping[str, Any], most: Limits) -> Iterator[str]:
    for place, container in _containers(pod):
        limits = _object(_object(container.get("resources")).get("limits"))
        for name, highest in (("memory", most.memory_bytes), ("cpu", most.cpu_count)):
            if name not in limits:
                continue
            try:
                asked = quantity(limits[name])
            except ValueError as error:
                yield f"{place}.resources.limits.{name}: {error}"
                continue
            if highest and asked > highest:
                yield (
                    f"{place}.resources.limits.{name} is {limits[name]}, more than the {highest:g} that this runner gives"
                )


def _containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every container of a pod, after its place."""
    for name in _CONTAINER_LISTS:
        for index, container in enumerate(_objects(pod.get(name))):
            yield f"spec.template.spec.{name}[{index}]", container


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
