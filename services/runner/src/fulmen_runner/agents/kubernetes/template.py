"""Parses and checks templates of Kubernetes Jobs.

Invariant: a parsed template is plain data of bounded size, has one agent container, and, unless the runner allows host
access, uses neither the node nor Secrets and tokens of the namespace. Other errors are reported by the cluster.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.templates import Placeholders, expand
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_service_kit.kubernetes.documents import quantity

MAX_TEMPLATE_BYTES = 64 * 1024
AGENT_CONTAINER = "agent"

_MAX_DEPTH = 100

_POD_SWITCHES = ("hostNetwork", "hostPID", "hostIPC", "nodeName")
_POD_IDENTITY = ("serviceAccountName", "serviceAccount", "automountServiceAccountToken")
_SAFE_VOLUMES = frozenset(
    {"name", "emptyDir", "configMap", "downwardAPI", "persistentVolumeClaim", "ephemeral", "image"}
)
"""Allowed kinds of volumes. Others belong to the node, or contain or need a Secret or token."""

_PROFILES = ("seccompProfile", "appArmorProfile")
_SAFE_PROFILE = "RuntimeDefault"
_PROFILE_ANNOTATIONS = ("seccomp.security.alpha.kubernetes.io/", "container.apparmor.security.beta.kubernetes.io/")
_SAFE_ANNOTATIONS = ("runtime/default", "docker/default")
_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
_OWN_FIELDS = ("selector", "manualSelector", "suspend", "managedBy")
_FORBIDDEN = "which is not allowed on this runner (FULMEN_RUNNER_JOB_HOST_ACCESS)"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTemplate:
    """A checked template.

    Attributes:
        manifest: The Job as data; its strings are templates.
        agent_index: Index of the agent's container.
        host_access: Whether it may override the runner's security contexts.
    """

    manifest: Mapping[str, Any] = field(repr=False)
    agent_index: int
    host_access: bool

    def filled(self, placeholders: Placeholders) -> dict[str, Any]:
        """Returns the manifest with all strings expanded; an input cannot change the structure.

        Raises:
            AgentFailed: If the templates do not match the input.
        """
        manifest = copy.deepcopy(dict(self.manifest))
        places = dict(_texts(manifest))
        expanded = expand({path: text for path, (text, _) in places.items()}, placeholders)
        for path, text in expanded.items():
            places[path][1](text)
        return manifest


def read_template(text: str, *, host_access: bool, max_limits: Limits) -> JobTemplate:
    """Parses a template.

    Args:
        text: YAML or JSON.
        host_access: Whether it may use the node, and the Secrets and service accounts of the namespace.
        max_limits: Upper bound of each container's limits.

    Raises:
        AgentFailed: If it is invalid; lists all problems.
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
        problems += _limit_problems(_pod(manifest), max_limits)
    if problems:
        raise AgentFailed("Job template of the agent is invalid: " + "; ".join(problems))
    return JobTemplate(manifest=manifest, agent_index=index, host_access=host_access)


def _parsed(text: str) -> tuple[dict[str, Any], list[str]]:
    # Deferred: not needed by runners without Jobs.
    import yaml

    if len(text.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        return {}, [f"it is larger than {MAX_TEMPLATE_BYTES} bytes"]
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            # Parsing time is quadratic in the depth.
            if depth > _MAX_DEPTH:
                return {}, ["it is nested too deeply"]
            # Nested aliases can expand exponentially.
            if isinstance(event, yaml.AliasEvent):
                return {}, ["it uses YAML aliases (`*name`), which are not supported"]
        manifest = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        return {}, ["it is not YAML: " + " ".join(str(error).split())]
    if not isinstance(manifest, dict):
        return {}, ["it is not a single YAML object"]
    return manifest, [f"{path} is neither a string, number, list nor object" for path in _not_json(manifest, "")]


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
            yield f"{name} is {manifest.get(name)!r}, expected {wanted!r}"
    if _object(manifest.get("metadata")).get("namespace"):
        yield "metadata.namespace cannot be set; the runner uses FULMEN_RUNNER_JOB_NAMESPACE"
    spec = _object(manifest.get("spec"))
    for name in ("parallelism", "completions"):
        if spec.get(name, 1) != 1:
            yield f"spec.{name} is {spec[name]!r}, expected 1: an attempt is one pod"
    for name in _OWN_FIELDS:
        if spec.get(name):
            yield f"spec.{name} cannot be set"
    deadline = spec.get("activeDeadlineSeconds", 1)
    if not isinstance(deadline, int) or deadline < 1:
        yield "spec.activeDeadlineSeconds is not a positive integer"


def _agent_index(manifest: Mapping[str, Any]) -> tuple[int, list[str]]:
    containers = _pod(manifest).get("containers")
    where = "spec.template.spec.containers"
    if not isinstance(containers, list) or not containers:
        return 0, [f"{where} is empty"]
    if not all(isinstance(container, dict) for container in containers):
        return 0, [f"{where} has an item that is not an object"]
    named = [index for index, each in enumerate(containers) if each.get("name") == AGENT_CONTAINER]
    if len(containers) > 1 and len(named) != 1:
        return 0, [f"{where} has {len(containers)} containers, of which one must be named {AGENT_CONTAINER!r}"]
    index = named[0] if named else 0
    problems = [
        f"{where}[{index}].{name} is missing"
        for name in ("name", "image")
        if not isinstance(containers[index].get(name), str)
    ]
    return index, problems


def _shape_problems(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yields fields of the wrong type that the runner has to extend."""
    where = "spec.template.spec"
    if not isinstance(pod.get("securityContext") or {}, dict):
        yield f"{where}.securityContext is not an object"
    for name in ("volumes", *_CONTAINER_LISTS[1:]):
        members = pod.get(name) or []
        if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
            yield f"{where}.{name} is not a list of objects"
    for place, container in _containers(pod):
        for name in ("securityContext", "resources"):
            if not isinstance(container.get(name) or {}, dict):
                yield f"{place}.{name} is not an object"
        if not isinstance(_object(container.get("resources")).get("limits") or {}, dict):
            yield f"{place}.resources.limits is not an object"


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
    return (f"{use}, {_FORBIDDEN}" for use in uses)


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
    """Yields settings that weaken a container's isolation; a profile of the node may do nothing."""
    for name in _PROFILES:
        if name in security and _object(security[name]).get("type") != _SAFE_PROFILE:
            yield f"{name}.type"
    if security.get("procMount") not in (None, "Default"):
        yield "procMount"
    for name in ("seLinuxOptions", "windowsOptions"):
        if security.get(name):
            yield name


def _limit_problems(pod: Mapping[str, Any], maximum: Limits) -> Iterator[str]:
    for place, container in _containers(pod):
        limits = _object(_object(container.get("resources")).get("limits"))
        for name, highest in (("memory", maximum.memory_bytes), ("cpu", maximum.cpu_count)):
            if name not in limits:
                continue
            try:
                asked = quantity(limits[name])
            except ValueError as error:
                yield f"{place}.resources.limits.{name}: {error}"
                continue
            if highest and asked > highest:
                yield (f"{place}.resources.limits.{name} is {limits[name]}, above this runner's maximum of {highest:g}")


def _containers(pod: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path and content of every container of a pod."""
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
    """Yields every string in a document with its path and a setter."""
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
