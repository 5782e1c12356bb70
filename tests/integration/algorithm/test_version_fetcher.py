"""A weight agent fetches what its engine lacks of a version, and puts complete weights together from differences."""

from __future__ import annotations

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.delta import DELTA_FILE
from tests.support.algorithm.fetched_versions import World, weights_of, world
from tests.support.algorithm.model_folders import content_of, model_folder
from tests.support.algorithm.policy_versions import tensors

__all__ = ["world"]


async def test_complete_weights_are_fetched_as_they_are(world: World) -> None:
    folder = await world.full(1)
    policy = await world.fetch(pb.WEIGHTS_KIND_FULL, 1)
    assert policy.kind is WeightsKind.FULL
    assert content_of(policy.path) == content_of(folder)
    assert world.fetched.size_bytes == sum(map(len, content_of(folder).values()))


async def test_a_difference_is_all_that_is_fetched_for_an_engine_with_its_base(world: World) -> None:
    await world.full(1)
    delta = await world.delta(2)
    policy = await world.fetch(pb.WEIGHTS_KIND_DELTA, 2, loaded=1)
    assert (policy.kind, policy.base_sha256) == (WeightsKind.DELTA, tensors(1).sha256())
    assert content_of(policy.path) == content_of(delta)
    assert world.fetched.size_bytes == sum(map(len, content_of(delta).values()))


async def test_complete_weights_are_put_together_here_for_an_engine_that_takes_no_difference(world: World) -> None:
    await world.full(1)
    for number in (2, 3):
        await world.delta(number)
    await weights_of(await world.fetch(pb.WEIGHTS_KIND_FULL, 1))
    for number in (2, 3):
        policy = await world.fetch(pb.WEIGHTS_KIND_DELTA, number)
        assert policy.kind is WeightsKind.DELTA
        before = world.fetched.size_bytes
        assert await weights_of(policy) == tensors(number).sha256()
        assert world.fetched.size_bytes == before
    # What no later version needs is gone.
    assert len(world.kept()) == 3, world.kept()


async def test_complete_weights_are_fetched_where_a_difference_has_no_base_or_is_damaged(world: World) -> None:
    await world.full(1)
    for number in (2, 3):
        await world.delta(number)
    without_base = await world.fetch(pb.WEIGHTS_KIND_DELTA, 2)
    assert without_base.kind is WeightsKind.FULL
    assert await weights_of(without_base) == tensors(2).sha256()
    damaged = await world.fetch(pb.WEIGHTS_KIND_DELTA, 3)
    assert damaged.kind is WeightsKind.DELTA
    (damaged.path / DELTA_FILE).write_bytes(b"not a difference")
    assert await weights_of(damaged) == tensors(3).sha256()


async def test_the_base_of_adapters_is_fetched_once(world: World) -> None:
    base = await world.full(1)
    sizes = []
    for number in (2, 3):
        adapter = await world.lora(number, base)
        policy = await world.fetch(pb.WEIGHTS_KIND_LORA, number)
        assert policy.base_model is not None
        assert content_of(policy.base_model) == content_of(base)
        assert content_of(policy.adapters["default"]) == {"adapter_config.json": b"{}"}
        sizes.append(world.fetched.size_bytes - sum(map(len, content_of(adapter).values())))
    assert sizes == [sum(map(len, content_of(base).values())), 0]
    assert world.kept() == {"base", "3-adapters"}


async def test_the_base_of_an_earlier_process_is_used_again_unless_it_is_another_model(world: World) -> None:
    own = await world.full(1)
    other = model_folder(own.with_name("other"), seed=9)
    await world.lora(2, own)
    await world.fetch(pb.WEIGHTS_KIND_LORA, 2)
    adapter = await world.lora(3, own)
    await world.restart().fetch(pb.WEIGHTS_KIND_LORA, 3)
    assert world.fetched.size_bytes == sum(map(len, content_of(adapter).values()))
    await world.lora(4, other)
    policy = await world.restart().fetch(pb.WEIGHTS_KIND_LORA, 4)
    assert policy.base_model is not None
    assert content_of(policy.base_model) == content_of(other)
