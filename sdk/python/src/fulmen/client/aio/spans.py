"""Spans and traces of rollouts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from fulmen.client.aio.base import Part, listed
from fulmen.client.traces import Span, Trace
from fulmen.client.view import Named
from fulmen.store.v1 import span_service_pb2

__all__ = ["AsyncSpans"]


class AsyncSpans(Part):
    """The spans of rollouts."""

    async def list(
        self,
        rollout: str | Named,
        *,
        names: Sequence[str] = (),
        name_prefix: str = "",
        errors_only: bool = False,
        model_calls_only: bool = False,
    ) -> AsyncIterator[Span]:
        """Yields the spans of a rollout or attempt, ordered by start time.

        >>> [done] = await client.rollouts.list(states=["succeeded"], limit=1).to_list()
        >>> [span.name async for span in client.spans.list(done, errors_only=True)]
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
        wanted = span_service_pb2.SpanFilter(
            names=names, name_prefix=name_prefix, errors_only=errors_only, model_calls_only=model_calls_only
        )
        request = span_service_pb2.ListSpansRequest(
            parent=self._session.rollout(rollout), filter=wanted if wanted.ByteSize() else None
        )
        async for each in listed(self._services.spans.ListSpans, request, "spans"):
            yield Span(each)

    async def trace(self, rollout: str | Named) -> Trace:
        """Returns all spans of a rollout or attempt.

        >>> [done] = await client.rollouts.list(states=["succeeded"], limit=1).to_list()
        >>> trace = await client.spans.trace(done)
        >>> trace.rollout == done.name, len(trace.model_calls)
        (True, 0)

        Raises:
            RolloutNotFound: if there is none.
        """
        return Trace(self._session.rollout(rollout), [each async for each in self.list(rollout)])
