"""Spans and traces of rollouts. Made by tools/sync_client.py of `fulmen.client.aio.spans`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fulmen.client.aio.spans import AsyncSpans
from fulmen.client.face import Face
from fulmen.client.traces import Span, Trace
from fulmen.client.view import Named

__all__ = ["Spans"]


class Spans(Face):
    """The spans of rollouts."""

    _wraps = AsyncSpans
    _aio: AsyncSpans

    def list(
        self,
        rollout: str | Named,
        *,
        names: Sequence[str] = (),
        name_prefix: str = "",
        errors_only: bool = False,
        model_calls_only: bool = False,
    ) -> Iterator[Span]:
        """Yields the spans of a rollout or attempt, ordered by start time.

        >>> [done] = client.rollouts.list(states=["succeeded"], limit=1).to_list()
        >>> [span.name for span in client.spans.list(done, errors_only=True)]
        []

        Args:
            rollout: its name, UUID or record, or an attempt.
            names: only spans with one of these names.
            name_prefix: only spans whose name begins with this.
            errors_only: only spans that failed.
            model_calls_only: only captured model calls.

        Raises:
            RolloutNotFound: if there is none.
        """
        return self._iterate(
            self._aio.list(
                rollout,
                names=names,
                name_prefix=name_prefix,
                errors_only=errors_only,
                model_calls_only=model_calls_only,
            )
        )

    def trace(self, rollout: str | Named) -> Trace:
        """Returns all spans of a rollout or attempt.

        >>> [done] = client.rollouts.list(states=["succeeded"], limit=1).to_list()
        >>> trace = client.spans.trace(done)
        >>> trace.rollout == done.name, len(trace.model_calls)
        (True, 0)

        Raises:
            RolloutNotFound: if there is none.
        """
        return self._call(self._aio.trace(rollout))

    @property
    def aio(self) -> AsyncSpans:
        """The same, asynchronous, over the same connection."""
        return self._aio
