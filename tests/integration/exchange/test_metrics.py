"""What Prometheus is shown of the shards that a server holds."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fulmen_exchange.server.prometheus import ExchangeMetrics
from tests.support.exchange.world import RUN, Join, Member, Site, running

QUICK = {"quorum": 0.5, "min_wait_s": 1.0, "max_wait_s": 1.0, "straggler_timeout_s": 300.0}


class Scraped:
    """The samples of one scrape, as Prometheus reads them; `shard` is the first one."""

    def __init__(self, site: Site) -> None:
        registry = CollectorRegistry()
        registry.register(ExchangeMetrics(site.servicer.held))
        text = generate_latest(registry).decode()
        self._samples = {
            (sample.name.removeprefix("fulmen_algorithm_exchange_"), frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, *, run: str = RUN, **labels: str) -> float | None:
        wanted = {"project": "default", "run": run.rpartition("/")[2], "shard": "0", **labels}
        return self._samples.get((name, frozenset(wanted.items())))


async def exchange(members: list[Member], number: int) -> None:
    await asyncio.gather(*(asyncio.to_thread(member.exchange, number) for member in members))


async def test_members_bytes_and_rounds_are_counted(site: Site, join: Join) -> None:
    members = [await join(rank) for rank in range(2)]
    for number in (1, 2, 3):
        await exchange(members, number)
    await site.tick(0.0)
    scraped = Scraped(site)
    totals = site.shard().machine.totals

    assert (scraped("members"), scraped("world_size"), scraped("round"), scraped("epoch")) == (2, 2, 3, 2)
    assert (scraped("sums_total"), scraped("partial_sums_total")) == (3, 0)
    assert scraped("raw_bytes_total") == 3 * 2 * 4 * members[0].layout.size_of(0)
    assert scraped("received_bytes_total") == totals.received_bytes > 0
    assert scraped("sent_bytes_total") == sum(member.link.received_bytes for member in members)
    # The third round is over only when a fourth has begun.
    assert scraped("round_seconds_count") == 2
    assert scraped("payloads_total", status="accepted") == 6
    assert scraped("members", run="projects/default/trainingRuns/2") is None


async def test_each_round_is_counted_once_and_its_seconds_where_they_belong(site: Site, join: Join) -> None:
    members = [await join(rank) for rank in range(2)]
    await exchange(members, 1)
    first = asyncio.create_task(asyncio.to_thread(members[0].exchange, 2))
    await site.until(lambda: site.has_sent(0, 2))
    await site.tick(2.0)
    await asyncio.to_thread(members[1].exchange, 2)
    await first
    await exchange(members, 3)
    for _ in range(3):
        await site.tick(0.0)
    scraped = Scraped(site)

    assert scraped("round_seconds_sum") == pytest.approx(2.0)
    counts = [scraped("round_seconds_bucket", le=bound) for bound in ("0.01", "1.0", "3.0", "+Inf")]
    assert counts == [1, 1, 2, 2]


async def test_sums_without_all_and_what_came_late_are_counted(site: Site, join: Join) -> None:
    members = [await join(rank, link=QUICK) for rank in range(2)]
    await exchange(members, 1)
    first = asyncio.create_task(asyncio.to_thread(members[0].exchange, 2))
    await site.until(lambda: site.has_sent(0, 2))
    await site.tick(1.5)
    await first
    await asyncio.to_thread(members[1].exchange, 2)
    scraped = Scraped(site)

    assert (scraped("sums_total"), scraped("partial_sums_total")) == (2, 1)
    assert scraped("payloads_total", status="late") == 1
    assert scraped("payloads_total", status="invalid") == 0


async def test_who_is_silent_is_counted_as_removed_and_a_forgotten_shard_is_shown_no_more(
    site: Site, join: Join
) -> None:
    members = [await join(rank, link={"lease_s": 5.0}) for rank in range(2)]
    await exchange(members, 1)
    for member in members:
        await asyncio.to_thread(member.link.kill)
    await site.tick(6.0)
    gone = Scraped(site)
    await site.tick(601.0)

    assert (gone("members"), gone("removed_members_total")) == (0, 2)
    assert Scraped(site)("members") is None


async def test_a_residual_that_a_restart_has_lost_is_counted(join: Join) -> None:
    async with running(Site()) as site:
        members = [await join(rank, targets=[site.target], ratio_down=100.0) for rank in range(2)]
        await exchange(members, 1)
        await site.stop()
        await site.start()
        await exchange(members, 2)

        assert Scraped(site)("lost_residuals_total") == 1
