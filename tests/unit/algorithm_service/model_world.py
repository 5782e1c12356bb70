"""A model of the world around a run: a store that keeps everything, an engine that remembers what it serves.

The process can be killed at will: `Crashes` stops at the n-th call of a port, before or after its effect, and the test
then drops everything that was not in the world or on the disk.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fulmen.errors import ResourceNotFound
from fulmen_algorithm.domain.groups import FinishedGroup, FinishedRollout, GroupSpec, train_index
from fulmen_algorithm.domain.ports import Content, Notify, PublishedPolicy
from fulmen_algorithm.domain.trajectory import RolloutTrajectory, TokenSequence


@dataclass(slots=True)
class Crashes:
    """Counts the calls of all ports and ends the process at one of them."""

    at_call: int | None = None
    after_effect: bool = False
    calls: int = 0
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    async def before(self) -> None:
        """Counts a call; ends the process before its effect, if it is its turn."""
        self.calls += 1
        if self.calls == self.at_call and not self.after_effect:
            await self._end()

    async def after(self) -> None:
        """Ends the process after the effect of the call, if it is its turn."""
        if self.calls == self.at_call and self.after_effect:
            await self._end()

    async def _end(self) -> None:
        self.killed.set()
        await asyncio.Event().wait()  # nothing comes after the end


@dataclass(slots=True)
class World:
    """What survives crashes."""

    chance: random.Random
    crashes: Crashes = field(default_factory=Crashes)
    failure_rate: float = 0.0
    groups: dict[str, GroupSpec] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    feed: list[FinishedGroup] = field(default_factory=list)
    sampled_with: dict[str, int] = field(default_factory=dict)
    resources: dict[str, list[bytes]] = field(default_factory=dict)
    requests: dict[str, Content] = field(default_factory=dict)
    served: PublishedPolicy | None = None
    served_versions: list[int] = field(default_factory=list)
    cancelled: bool = False
    answer_tokens: int = 2
    truncated: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add_resource(self, resource: str, content: bytes) -> str:
        """Publishes a version from outside; returns its name."""
        versions = self.resources.setdefault(resource, [])
        versions.append(content)
        return f"{resource}/versions/{len(versions)}"

    def finish_one(self) -> None:
        """Ends a group that is pending, any of them."""
        group_id = self.pending.pop(self.chance.randrange(len(self.pending)))
        spec = self.groups[group_id]
        rollouts = tuple(self._rollout(f"rollouts/{group_id}.{n}") for n in range(spec.size))
        self.feed.append(FinishedGroup(group_id=group_id, rollouts=rollouts, cursor=str(len(self.feed) + 1)))

    def _rollout(self, name: str) -> FinishedRollout:
        self.sampled_with[f"{name}/attempts/1"] = self.served.version if self.served else 0
        failed = self.chance.random() < self.failure_rate
        return FinishedRollout(
            name=name,
            attempt=f"{name}/attempts/1",
            succeeded=not failed,
            reward=None if failed else float(self.chance.randrange(2)),
            failure="AGENT_ERROR" if failed else "",
        )


class ModelQueue:
    """The port `RolloutQueue`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def submit(self, groups: Sequence[GroupSpec]) -> None:
        """Keeps groups; the same group again must have the same content."""
        world = self._world
        await world.crashes.before()
        for group in groups:
            known = world.groups.setdefault(group.group_id, group)
            assert known == group, "a group was submitted again with another content"
            if known is group:
                world.pending.append(group.group_id)
        changed, world.changed = world.changed, asyncio.Event()
        changed.set()
        await world.crashes.after()

    async def watch(self, cursor: str) -> AsyncIterator[FinishedGroup]:
        """Finishes groups as they are asked for."""
        world = self._world
        position = int(cursor or 0)
        while True:
            changed = world.changed
            while position < len(world.feed) or world.pending:
                if position == len(world.feed):
                    world.finish_one()
                position += 1
                yield world.feed[position - 1]
                await asyncio.sleep(0)
            await changed.wait()

    async def trajectories(self, attempts: Sequence[str]) -> dict[str, RolloutTrajectory]:
        """Makes up tokens."""
        await self._world.crashes.before()
        return {name: self._trajectory(name) for name in attempts}

    def _trajectory(self, attempt: str) -> RolloutTrajectory:
        chance = random.Random(attempt)
        count = self._world.answer_tokens
        prompt = [4, *(chance.randrange(6, 16) for _ in range(3))]
        answer = [*(chance.randrange(6, 16) for _ in range(count - 1)), 2]
        version = self._world.sampled_with[attempt]
        sequence = TokenSequence(
            token_ids=(*prompt, *answer),
            loss_mask=(False,) * 4 + (True,) * count,
            logprobs=(0.0,) * 4 + (-3.0,) * count,
            policy_versions=(0,) * 4 + (version,) * count,
        )
        return RolloutTrajectory(
            sequences=(sequence,), truncated=self._world.truncated, prompt_text="1+1=", answer_text="2"
        )

    async def known_train_groups(self, *, below: int) -> set[int]:
        """Lists what was submitted."""
        await self._world.crashes.before()
        return {i for name in self._world.groups if (i := train_index(name)) is not None and i >= below}

    async def cancel_all(self) -> None:
        """Forgets what is pending."""
        self._world.pending.clear()
        self._world.cancelled = True


class ModelShelf:
    """The port `ResourceShelf`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def get(self, name: str) -> Content:
        """Reads a version, or the newest."""
        resource, _, number = name.partition("/versions/")
        versions = self._world.resources.get(resource, [])
        version = int(number or len(versions))
        if not 1 <= version <= len(versions):
            raise ResourceNotFound("There is no such resource.", resource=name)
        return Content(name=f"{resource}/versions/{version}", version=version, data=versions[version - 1])

    async def publish(
        self, *, resource: str, kind: str, content: bytes, content_type: str, parent: str, request_id: str
    ) -> Content:
        """Keeps a version, once per request id."""
        world = self._world
        await world.crashes.before()
        if request_id not in world.requests:
            name = world.add_resource(resource, content)
            version = int(name.rpartition("/")[2])
            world.requests[request_id] = Content(name=name, version=version, data=content)
        await world.crashes.after()
        return world.requests[request_id]


class ModelServing:
    """The port `Serving`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def serve(self, policy: PublishedPolicy, overrides: Mapping[str, str], notify: Notify) -> None:
        """Serves a version."""
        assert json.loads(overrides["validation"])["temperature"] == 0
        await self.swap(policy)

    async def swap(self, policy: PublishedPolicy) -> None:
        """Serves another version; its folder must be complete."""
        await self._world.crashes.before()
        assert (policy.path / "model.safetensors").exists()
        self._world.served = policy
        self._world.served_versions.append(policy.version)
        await self._world.crashes.after()

    async def sampled_tokens(self) -> int:
        """Counts two tokens for each rollout."""
        return 2 * len(self._world.sampled_with)


async def no_build(bundle: bytes, target: str, bundle_dir: Path, output_dir: Path, seed: int) -> None:
    """Refuses to build."""
    raise AssertionError("no run of these tests builds a model")
