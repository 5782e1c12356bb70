"""The parts of the proxy that have to do with limits, usage and its cost, put together."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from fulmen.rpc.channel import FulmenChannel
from fulmen_llm_proxy.calls.meter import Meter
from fulmen_llm_proxy.limits.limiter import CallLimiter
from fulmen_llm_proxy.limits.prices import Price, PriceTable
from fulmen_llm_proxy.limits.usage_book import UsageBook
from fulmen_llm_proxy.limits.usage_sync import StoreClock, UsageSync
from fulmen_llm_proxy.metrics.usage import UsageMetrics
from fulmen_llm_proxy.settings import LlmProxySettings, ModelPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterParts:
    """What calls pass, and the role that tells the store."""

    meter: Meter
    exchange: UsageSync
    prices: PriceTable


def wire_meter(
    settings: LlmProxySettings, channel: FulmenChannel, instance_id: str, registry: CollectorRegistry
) -> MeterParts:
    """Wires the parts."""
    clock = StoreClock(wall=time.time, monotonic=time.monotonic)
    limiter, usage = CallLimiter(clock=clock.now), UsageBook()
    prices = PriceTable({pattern: _price(price) for pattern, price in settings.prices.items()})
    meter = Meter(
        limiter=limiter,
        usage=usage,
        prices=prices,
        project=settings.project,
        assumed_completion_tokens=settings.assumed_completion_tokens,
        refused=UsageMetrics(registry, usage).refused,
    )
    exchange = UsageSync(channel=channel, instance_id=instance_id, usage=usage, limiter=limiter, clock=clock)
    return MeterParts(meter=meter, exchange=exchange, prices=prices)


def _price(price: ModelPrice) -> Price:
    return Price(
        input=price.input,
        cached_input=price.input if price.cached_input is None else price.cached_input,
        cache_write=price.input if price.cache_write is None else price.cache_write,
        output=price.output,
    )
