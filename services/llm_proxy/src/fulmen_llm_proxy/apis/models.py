"""The list of served models in the format of each vendor; their creation time is unknown and given as 1970."""

from __future__ import annotations

from collections.abc import Iterable

from fulmen_llm_proxy.apis.api import Dialect, encode

_OWNER = "fulmen"
_UNKNOWN_TIME = "1970-01-01T00:00:00Z"


def model_list(names: Iterable[str], dialect: Dialect) -> bytes:
    """Returns the list of models, on one page."""
    models = [_model(name, dialect) for name in sorted(names)]
    if dialect is Dialect.ANTHROPIC:
        edges = {"first_id": models[0]["id"] if models else None, "last_id": models[-1]["id"] if models else None}
        return encode({"data": models, "has_more": False, **edges})
    return encode({"object": "list", "data": models})


def model_document(name: str, dialect: Dialect) -> bytes:
    """Returns one model."""
    return encode(_model(name, dialect))


def _model(name: str, dialect: Dialect) -> dict[str, object]:
    if dialect is Dialect.ANTHROPIC:
        fields = {"display_name": name, "created_at": _UNKNOWN_TIME, "lifecycle": "active"}
        return {"type": "model", "id": name, **fields}
    return {"id": name, "object": "model", "created": 0, "owned_by": _OWNER}
