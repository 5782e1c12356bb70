"""KEDA's external scaler: the wanted number of slots, and the slots per runner.

KEDA sends no authorization header: the token is part of the trigger's metadata. It is checked first, like any other
token, and never logged or returned.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

import grpc.aio

from fulmen.errors import Draining
from fulmen.keda import externalscaler_pb2 as pb
from fulmen.keda import externalscaler_pb2_grpc
from fulmen_service_kit.rpc.edge import address_of
from fulmen_service_kit.security.auth import current_caller
from fulmen_service_kit.security.permissions import SCALER
from fulmen_service_kit.security.tokens import Caller
from fulmen_store.malformed import malformed
from fulmen_store.runners.demand import DemandQuery
from fulmen_store.runners.fleet_demand import FleetDemand
from fulmen_store.transport.wire.queues import OptionalNumber, checked_query, demand_project

__all__ = ["ScalerService"]

METRIC: Final = "fulmen-wanted-slots"
POLL_INTERVAL_S: Final = 2.0
# Interval at which an unchanged result is sent again.
REPEAT_S: Final = 60.0

TOKEN: Final = "token"  # noqa: S105  # the name of a key, no secret
OWN_KEYS: Final = frozenset(
    {TOKEN, "project", "labels", "targetDrainSeconds", "slotsPerRunner", "defaultDurationSeconds", "forecastSeconds"}
)
# KEDA passes on the complete metadata of the trigger, including its own keys.
KEDA_KEYS: Final = frozenset(
    {"scalerAddress", "tlsCertFile", "caCert", "tlsClientCert", "tlsClientKey", "enableTLS", "unsafeSsl"}
)
# For a key with this suffix, KEDA sends the value of the named variable under the unchanged key.
FROM_ENVIRONMENT: Final = "FromEnv"
MAX_SHOWN_KEY: Final = 64

Identify = Callable[[str, str, str], Awaitable[Caller]]


class ScalerService(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Serves the external scaler."""

    def __init__(self, *, demand: FleetDemand, identify: Identify, stopping: asyncio.Event) -> None:
        """Creates the servicer; `identify` authenticates a caller by rpc, authorization and address."""
        self._demand = demand
        self._identify = identify
        self._stopping = stopping

    async def IsActive(self, request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext) -> pb.IsActiveResponse:
        """Returns whether any runner is wanted."""
        query = await self._query("IsActive", request, context)
        demand, _ = await self._demand.demand(query)
        return pb.IsActiveResponse(result=demand.slots > 0)

    async def StreamIsActive(
        self, request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Streams whether any runner is needed: immediately, at every change and periodically."""
        sent: bool | None = None
        sent_at = -math.inf
        while not self._stopping.is_set():
            # Checked on every poll, because a token may be revoked or expire.
            query = await self._query("StreamIsActive", request, context)
            demand, _ = await self._demand.demand(query)
            is_active, now = demand.slots > 0, time.monotonic()
            if is_active is not sent or now >= sent_at + REPEAT_S:
                sent, sent_at = is_active, now
                yield pb.IsActiveResponse(result=is_active)
            await asyncio.sleep(POLL_INTERVAL_S)
        raise Draining("The store is shutting down: open the stream again.")

    async def GetMetricSpec(
        self, request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext
    ) -> pb.GetMetricSpecResponse:
        """Returns the metric: wanted slots, with the slots per runner as the target."""
        slots = (await self._query("GetMetricSpec", request, context)).slots_per_runner
        spec = pb.MetricSpec(metricName=METRIC, targetSize=slots, targetSizeFloat=slots)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(
        self, request: pb.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetMetricsResponse:
        """Returns the number of wanted slots."""
        query = await self._query("GetMetrics", request.scaledObjectRef, context)
        if request.metricName and not request.metricName.endswith(METRIC):
            raise malformed("metricName", f"the only metric is {METRIC}")
        demand, _ = await self._demand.demand(query)
        value = pb.MetricValue(metricName=METRIC, metricValue=demand.slots, metricValueFloat=demand.slots)
        return pb.GetMetricsResponse(metricValues=[value])

    async def _query(self, rpc: str, request: pb.ScaledObjectRef, context: grpc.aio.ServicerContext) -> DemandQuery:
        """Authenticates the caller, then decodes the query.

        Raises:
            TokenInvalid: If the token is missing or invalid.
            TooManyInvalidTokens: If the address has presented too many forged tokens.
            PermissionDenied: If the caller's role or project does not allow the query.
            QuotaExceeded: If the caller's project has made too many calls.
            ArgumentInvalid: If a key is unknown or its value malformed.
        """
        given = _named(request.scalerMetadata)
        caller = await self._caller(f"/{SCALER}/{rpc}", given.get(TOKEN, ""), address_of(context.peer()))
        unknown = sorted(given.keys() - OWN_KEYS - KEDA_KEYS)
        if unknown:
            raise malformed("scalerMetadata", f"has no key {unknown[0][:MAX_SHOWN_KEY]!r}; there are {_known()}")
        return checked_query(
            project=demand_project(given.get("project", ""), caller),
            labels=_labels(given.get("labels", "")),
            target_drain_s=_number(given, "targetDrainSeconds"),
            slots_per_runner=_number(given, "slotsPerRunner"),
            default_duration_s=_number(given, "defaultDurationSeconds"),
            forecast_s=_number(given, "forecastSeconds"),
        )

    async def _caller(self, rpc: str, token: str, address: str) -> Caller:
        try:
            return current_caller()
        except LookupError:
            return await self._identify(rpc, f"Bearer {token}" if token else "", address)


def _named(metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the metadata; strips the suffix `FromEnv` from the scaler's own keys.

    Raises:
        ArgumentInvalid: If a key is given twice, directly and from the environment.
    """
    given: dict[str, str] = {}
    for key, value in metadata.items():
        name = key.removesuffix(FROM_ENVIRONMENT)
        name = name if name in OWN_KEYS else key
        if name in given:
            raise malformed("scalerMetadata", f"has {name} and {name}{FROM_ENVIRONMENT}; one of them is needed")
        given[name] = value
    return given


def _known() -> str:
    return ", ".join(sorted(OWN_KEYS))


def _number(given: Mapping[str, str], key: str) -> OptionalNumber:
    text = given.get(key, "").strip()
    if not text:
        return key, None
    try:
        value = float(text)
    except ValueError:
        raise malformed(f"scalerMetadata.{key}", "is not a number") from None
    if not math.isfinite(value):
        raise malformed(f"scalerMetadata.{key}", "is not a number")
    return key, value


def _labels(text: str) -> dict[str, str]:
    pairs = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    if any(not key or not equals for key, equals, _ in pairs):
        raise malformed("scalerMetadata.labels", "is written `key=value,key=value`")
    return {key.strip(): value.strip() for key, _, value in pairs}
