"""A model of the world around a run: a store that keeps everything, an engine that remembers what it serves.

The process can be killed at will: `Crashes` stops at the n-th call of a port, before or after its effect, and the test
then drops everything that was not in the world or on the disk.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fulmen.errors import ResourceNotFound
from fulmen_algorithm.policy.policy import PAST_SUFFIX
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout, GroupSpec, of_branch, train_index
from fulmen_algorithm.rollouts.trajectory import Conversation, RolloutTrajectory, TokenCall, TokenSequence
from fulmen_algorithm.runs.ports import ChatAnswer, ChatRequest, Content, Notify, PublishedPolicy, RunFence, SwapStats
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.tensor_files import read_folder
from tests.support.algorithm.crashes import Crashes
from tests.support.algorithm.run_leases import LeaseTable


@dataclass(slots=True)
class World:
    """What survives crashes."""

    chance: random.Random
    crashes: Crashes = field(default_factory=Crashes)
    failure_rate: float = 0.0
    failure: str = "AGENT_ERROR"
    """What rollouts fail by."""
    fails: Callable[[str], bool] | None = None
    """Which rollouts do, by name, beside those that fail by chance."""
    groups: dict[str, GroupSpec] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    feed: list[FinishedGroup] = field(default_factory=list)
    sampled_with: dict[str, int] = field(default_factory=dict)
    resources: dict[str, list[bytes]] = field(default_factory=dict)
    requests: dict[str, Content] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    served: PublishedPolicy | None = None
    served_versions: list[int] = field(default_factory=list)
    past_versions: list[int] = field(default_factory=list)
    """Versions that were served as opponents, in order."""
    kinds: list[WeightsKind] = field(default_factory=list)
    refuses: Exception | None = None
    """Refuses further groups once there are three."""
    cancelled: bool = False
    handed_over: bool = False
    leases: LeaseTable = field(default_factory=LeaseTable)
    answer_tokens: int = 2
    forced: int | None = None
    """Tokens of an answer that a constraint leaves no alternative to; None if calls are not constrained."""
    turns: int = 1
    """Model calls of a rollout, which are one sequence."""
    roles: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Policy and model that each role asks; empty for one agent without a name."""
    truncated: bool = False
    truncates: Callable[[str], bool] = lambda _: False
    """Which rollouts have a truncated answer, by name, beside all if `truncated`."""
    tokens_of: Callable[[str], int] | None = None
    """Tokens of the answer of a rollout, by name; None for `answer_tokens`."""
    reward_of: Callable[[str], float] | None = None
    answer_text: str = ""
    conversations: tuple[Conversation, ...] = ()
    others: dict[str, list[FinishedGroup]] = field(default_factory=dict)
    read: Callable[[Sequence[str]], None] = lambda _: None
    """Is told of attempts whose trajectories are read."""
    asked: list[ChatRequest] = field(default_factory=list)
    asking: int = 0
    asking_most: int = 0
    """Questions that were under way at a time, at most."""
    answer: Callable[[ChatRequest], str] = lambda _: ""
    score: Callable[[str, Sequence[int]], list[float]] = lambda _, ids: [0.0] * len(ids)
    """Log-probabilities of tokens under a model that a run asks for them."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    in_order: bool = False
    sampled_early: bool = False
    foreign: Mapping[str, int] = field(default_factory=dict)
    """Policy versions that are not the run's, by the end of the names of the rollouts that were sampled with them."""
    submitted_with: dict[str, int] = field(default_factory=dict)
    children: dict[str, "World"] = field(default_factory=dict)

    def child(self, run_id: str) -> "World":
        """Gives a run its own queue and engine; resources are shared."""
        if run_id not in self.children:
            self.children[run_id] = World(chance=self.chance, crashes=self.crashes, leases=self.leases)
        return self.children[run_id]

    def new_life(self, crashes: Crashes) -> None:
        """Begins the next life of the process, for all runs."""
        for each in (self, *self.children.values()):
            each.crashes, each.changed = crashes, asyncio.Event()

    def of(self, run: TrainingRun) -> "World":
        """Returns what a run sees."""
        return self.children.get(run.run_id, self)

    @property
    def names(self) -> dict[str, str]:
        """Names of the versions that runs have published, by request id."""
        return {request_id: content.name for request_id, content in self.requests.items()}

    def add_resource(self, resource: str, content: bytes) -> str:
        """Publishes a version from outside; returns its name."""
        versions = self.resources.setdefault(resource, [])
        versions.append(content)
        return f"{resource}/versions/{len(versions)}"

    def finish_one(self) -> None:
        """Ends a group that is pending, any of them."""
        group_id = self.pending.pop(0 if self.in_order else self.chance.randrange(len(self.pending)))
        spec = self.groups[group_id]
        names = [f"projects/default/rollouts/{group_id}.{n}" for n in range(spec.size)]
        rollouts = tuple(replace(self._rollout(name), task=spec.task) for name in names)
        self.feed.append(FinishedGroup(group_id=group_id, rollouts=rollouts, cursor=str(len(self.feed) + 1)))

    def _rollout(self, name: str) -> FinishedRollout:
        served = self.served.version if self.served else 0
        early = self.sampled_early and self.chance.random() < 0.5
        group_id = name.removeprefix("projects/default/rollouts/").rpartition(".")[0]
        foreign = [version for end, version in self.foreign.items() if name.endswith(end)]
        self.sampled_with[f"{name}/attempts/1"] = next(
            iter(foreign), self.submitted_with[group_id] if early else served
        )
        failed = self.chance.random() < self.failure_rate or (self.fails is not None and self.fails(name))
        return FinishedRollout(
            name=name,
            attempt=f"{name}/attempts/1",
            succeeded=not failed,
            reward=None if failed else self._reward(name),
            failure=self.failure if failed else "",
        )

    def _reward(self, name: str) -> float:
        return float(self.chance.randrange(2)) if self.reward_of is None else self.reward_of(name)


class ModelQueue:
    """The port `RolloutQueue`."""

    def __init__(self, world: World, fence: RunFence) -> None:
        self._world = world
        self._fence = fence

    async def submit(self, groups: Sequence[GroupSpec]) -> None:
        """Stores groups; a group that is submitted again must have the same content."""
        world = self._world
        await world.crashes.before()
        world.leases.check(self._fence)
        if world.refuses is not None and len(world.groups) >= 3:
            raise world.refuses
        for group in groups:
            known = world.groups.setdefault(group.group_id, group)
            assert known == group, "a group was submitted again with another content"
            if known is group:
                world.pending.append(group.group_id)
                world.submitted_with[group.group_id] = world.served.version if world.served else 0
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
        await self._world.crashes.before()
        self._world.read(attempts)
        return {name: self._trajectory(name) for name in attempts}

    def _sequence(self, attempt: str, role: str, policy: str, model: str) -> TokenSequence:
        chance = random.Random(attempt + role)
        name = attempt.partition("/attempts/")[0]
        count = self._world.answer_tokens if self._world.tokens_of is None else self._world.tokens_of(name)
        prompt = [4, *(chance.randrange(6, 16) for _ in range(3))]
        answer = [*(chance.randrange(6, 16) for _ in range(count - 1)), 2]
        version, turns = self._world.sampled_with[attempt], self._world.turns
        forced, size = self._world.forced, 4 + count
        logprobs = (0.0,) * (forced or 0) + (-3.0,) * (count - (forced or 0))
        calls = [TokenCall(start=n * size + 4, end=(n + 1) * size, unit=n, constrained=True) for n in range(turns)]
        return TokenSequence(
            calls=() if forced is None else tuple(calls),
            token_ids=(*prompt, *answer) * turns,
            loss_mask=((False,) * 4 + (True,) * count) * turns,
            logprobs=((0.0,) * 4 + logprobs) * turns,
            policy_versions=((0,) * 4 + (version,) * count) * turns,
            role=role,
            policy=policy,
            model=model,
        )

    def _trajectory(self, attempt: str) -> RolloutTrajectory:
        roles = self._world.roles or {"": ("", "")}
        return RolloutTrajectory(
            sequences=tuple(self._sequence(attempt, role, *asked) for role, asked in roles.items()),
            truncated=self._world.truncated or self._world.truncates(attempt.partition("/attempts/")[0]),
            prompt_text="1+1=",
            answer_text=self._world.answer_text,
            conversations=self._world.conversations,
        )

    async def known_train_groups(self, *, below: int, branch: int) -> set[int]:
        await self._world.crashes.before()
        plain_ids = [plain_id for name in self._world.groups if (plain_id := of_branch(name, branch)) is not None]
        return {i for plain_id in plain_ids if (i := train_index(plain_id)) is not None and i >= below}

    async def finished_of(self, training_run: str) -> list[FinishedGroup]:
        await self._world.crashes.before()
        return self._world.others[training_run]

    async def cancel_all(self) -> None:
        """Cancels what is pending, and puts it on the feed."""
        await self._world.crashes.before()
        self._world.leases.check(self._fence)
        for group_id in self._world.pending:
            rollouts = [f"projects/default/rollouts/{group_id}.{n}" for n in range(self._world.groups[group_id].size)]
            ended = tuple(
                FinishedRollout(name=name, attempt="", succeeded=False, reward=None, failure="CANCELLED")
                for name in rollouts
            )
            cursor = str(len(self._world.feed) + 1)
            self._world.feed.append(FinishedGroup(group_id=group_id, rollouts=ended, cursor=cursor))
        self._world.pending.clear()
        self._world.cancelled = True
        await self._world.crashes.after()


class ModelResources:
    """The port `ResourceStore`."""

    def __init__(self, world: World, fence: RunFence | None = None) -> None:
        self._world = world
        self._fence = fence

    async def has_rollouts(self, training_run: str) -> bool:
        """Whether another run has made any."""
        return bool(self._world.others.get(training_run))

    async def get(self, name: str) -> Content:
        resource, _, number = name.partition("/versions/")
        versions = self._world.resources.get(resource, [])
        version = int(number or len(versions))
        if not 1 <= version <= len(versions):
            raise ResourceNotFound("There is no such resource.", resource=name)
        kind = "policy" if resource.startswith("resources/policy.") else "other"
        return Content(name=f"{resource}/versions/{version}", version=version, data=versions[version - 1], kind=kind)

    async def publish(
        self, *, resource: str, kind: str, content: bytes, content_type: str, parent: str, request_id: str
    ) -> Content:
        """Stores a version, once per request id; returns it without content, as the store does."""
        world = self._world
        world.leases.check(self._fence)
        await world.crashes.before()
        if request_id not in world.requests:
            name = world.add_resource(resource, content)
            version = int(name.rpartition("/")[2])
            world.requests[request_id] = Content(name=name, version=version, data=content, kind=kind)
        await world.crashes.after()
        return replace(world.requests[request_id], data=b"")

    async def point(self, resource: str, alias: str, version: int) -> None:
        await self._world.crashes.before()
        self._world.aliases[f"{resource}/aliases/{alias}"] = version
        await self._world.crashes.after()


class ModelChat:
    """The port `ChatModels`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Answers as the world says and counts the tokens."""
        world = self._world
        await world.crashes.before()
        world.asked.append(request)
        world.asking += 1
        world.asking_most = max(world.asking_most, world.asking)
        await asyncio.sleep(0)
        world.asking -= 1
        await world.crashes.after()
        return ChatAnswer(text=world.answer(request), prompt_tokens=10, completion_tokens=5)

    async def score(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """Scores tokens as the world says."""
        await self._world.crashes.before()
        return self._world.score(model, token_ids)


class ModelServing:
    """The port `Serving`."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def serve(self, policy: PublishedPolicy, overrides: Mapping[str, str], notify: Notify) -> None:
        # A run that only serves overrides nothing.
        assert not overrides or json.loads(overrides["validation"])["temperature"] == 0
        assert policy.kind is not WeightsKind.DELTA, "an engine begins with a delta"
        await self.swap(policy)

    async def swap(self, policy: PublishedPolicy) -> SwapStats:
        """Serves another version; what it is made of must be there, and be the weights that it says."""
        await self._world.crashes.before()
        if policy.kind is WeightsKind.LORA:
            assert policy.base_model is not None
            assert (policy.base_model / "model.safetensors").exists()
            assert all((folder / "adapter_model.safetensors").exists() for folder in policy.adapters.values())
        else:
            weights = read_folder(await policy.model_folder())
            assert policy.sha256 in ("", weights.sha256())
        if policy.policy.endswith(PAST_SUFFIX):
            self._world.past_versions.append(policy.version)
            await self._world.crashes.after()
            return SwapStats()
        self._world.kinds.append(policy.kind)
        self._world.served = policy
        self._world.served_versions.append(policy.version)
        await self._world.crashes.after()
        return SwapStats(pause_s=0.05, size_bytes=1000)

    def release(self) -> None:
        """Does nothing: the policy stays served."""

    async def sampled_tokens(self) -> int:
        return 2 * len(self._world.sampled_with)
