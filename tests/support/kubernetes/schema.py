"""Documents held against the schema of the Kubernetes API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kubernetes_validate

VERSION = "1.33"


def schema_problems(document: Mapping[str, Any]) -> str:
    """Returns what the API's schema says against a document, empty if nothing. Blocks."""
    try:
        kubernetes_validate.validate(dict(document), VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    return ""
