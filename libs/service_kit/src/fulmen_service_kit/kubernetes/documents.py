"""Reads documents of the Kubernetes API.

Sources: the Kubernetes API reference (Pod v1 `status`), "Pod disruption conditions".
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

MANAGED_BY = "app.kubernetes.io/managed-by"
"""Label of what made an object."""
IMAGE_WAITS = frozenset({"ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable"})
"""Reasons of a container that waits for its image."""
HOPELESS_WAITS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""Reasons of a container whose image will never be there."""
CONFIGURATION_WAITS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
"""Reasons of a container that cannot be created as requested."""
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FORM = re.compile(r"([0-9]{1,30}(?:\.[0-9]{0,30})?)(?:[eE]([+-]?[0-9]{1,2})|([KMGTPE]i|[numkMGTPE]?))")


def condition_of(document: Mapping[str, Any], kind: str, value: str = "True") -> Mapping[str, Any]:
    """Returns the condition of a kind if it has a value; empty if not."""
    conditions = document.get("status", {}).get("conditions") or []
    return next((each for each in conditions if each["type"] == kind and each["status"] == value), {})


def disruption_of(pod: Mapping[str, Any]) -> str:
    """Returns why the cluster ended a pod, such as an eviction; empty if it did not."""
    status = pod.get("status", {})
    disruption = condition_of(pod, "DisruptionTarget")
    if not status.get("reason") and not disruption:
        return ""
    return reason_of(status) if status.get("reason") else reason_of(disruption)


def waiting_of(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the state of a container that waits for its image or cannot be made; empty if none does."""
    status = pod.get("status", {})
    states = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    waits = [each.get("state", {}).get("waiting") for each in states]
    known = IMAGE_WAITS | HOPELESS_WAITS | CONFIGURATION_WAITS
    return next((wait for wait in waits if wait and wait.get("reason") in known), {})


def reason_of(status: Mapping[str, Any]) -> str:
    """Returns the reason and message of a status, a condition or a state as text."""
    reason, message = status.get("reason", ""), status.get("message", "")
    return f"{reason}: {message}" if reason and message else reason or message or "no reason given"


def quantity(value: object) -> float:
    """Parses a quantity, such as `512Mi` bytes or `500m` processors. Source: apimachinery, pkg/api/resource, `Quantity`.

    Raises:
        ValueError: If it is malformed.
    """
    form = _FORM.fullmatch(str(value)) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
    if form is None:
        raise ValueError(f"{str(value)[:40]!r} is not a quantity such as 500m or 512Mi")
    number, exponent, suffix = form.groups()
    if exponent:
        return float(Decimal(number) * Decimal(10) ** int(exponent))
    if suffix in _BINARY:
        return float(Decimal(number) * 1024 ** _BINARY[suffix])
    return float(Decimal(number) * Decimal(10) ** _DECIMAL[suffix or ""])
