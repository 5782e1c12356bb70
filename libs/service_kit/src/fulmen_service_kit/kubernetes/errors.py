"""Errors of a Kubernetes cluster. Nothing of its client is imported."""

_FORBIDDEN = frozenset({401, 403})
_TOO_MANY = 429
_SERVER_ERROR = 500


class KubernetesError(Exception):
    """The cluster returned an error, or did not answer (status 0)."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(f"Kubernetes cluster failed: {reason}")
        self.status = status
        self.reason = reason

    @property
    def is_forbidden(self) -> bool:
        """Whether the caller lacks a right."""
        return self.status in _FORBIDDEN

    @property
    def is_transient(self) -> bool:
        """Whether a retry may succeed."""
        return self.status in (0, _TOO_MANY) or self.status >= _SERVER_ERROR


class DocumentRejected(KubernetesError):
    """The cluster rejected a document as invalid."""
