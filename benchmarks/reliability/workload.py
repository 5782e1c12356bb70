"""The training run that must end, and its books: what was lost, doubled, skipped, or trained on twice."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.reliability.plan import Victim
from benchmarks.reliability.stand import REPOSITORY, Stand
from fulmen.rpc.services import Services, connect
from tests.support.algorithm.runs import start_run
from tests.support.chaos.oracle import TRAIN_PREFIX, Books, collect_books, failure_counts, problems_of

__all__ = ["STEPS", "Verdict", "Workload"]

STEPS = 24
TASKS = 64
PACE_S = 0.4
TURNS = 2
MIN_REWARD = 0.1
BOOKS_LIMIT_S = 60.0
# Everything that was created is in one of the two tables; nothing succeeds twice.
LOST = """
select count(*) as lost from rollout r join training_run t on t.id = r.run_id where t.name = $1
and not exists (select from item i where i.id = r.id) and not exists (select from rollout_end e where e.rollout_id = r.id)
"""
DOUBLED = """
select count(*) as doubled from (select a.rollout_id from attempt a join rollout r on r.id = a.rollout_id
join training_run t on t.id = r.run_id where t.name = $1 and a.state = 2 group by a.rollout_id having count(*) > 1) twice
"""
CREATED = "select count(*) as created from rollout r join training_run t on t.id = r.run_id where t.name = $1"
CONFIG = """\
name = "chaos"
[policy]
name = "chaos"
{first}
[agent]
{agent}
grader = "grader.py:grade"
[data]
train = "tasks.jsonl"
[[stage]]
algorithm = "grpo"
steps = {steps}
prompts_per_step = 4
group_size = 4
minibatches = 1
# Hardly any: rewards of a policy that has learned would all be equal, and nothing would be trained on.
learning_rate = 1e-6
max_tokens = 8
max_staleness = 1
mask_truncated = false
checkpoint_every = 2
{more}
"""
THROUGH_AGGREGATOR = """\
parallel = {{ kind = "ddp", ranks = 2 }}
exchange = {{ codec = "qsgd", link = {{ kind = "grpc", targets = ["127.0.0.1:{port}"] }} }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the books of a run say.

    Attributes:
        created: Rollouts.
        lost: Of them, those that neither wait, run nor have ended.
        doubled: Of them, those that succeeded, were fed or were consumed more than once.
        skipped: Groups of prompts that were never trained on although later ones were.
        trained_twice: Rollouts that more than one step was trained on.
        failed: Rollouts that ended without success.
        retried: Failed attempts by kind.
        problems: All that contradicts a promise, in words.
    """

    created: int = 0
    lost: int = 0
    doubled: int = 0
    skipped: int = 0
    trained_twice: int = 0
    failed: int = 0
    retried: dict[str, int]
    problems: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Returns JSON-ready values."""
        return asdict(self) | {"problems": list(self.problems)}


class Workload:
    """Starts runs on a stack and reads their books."""

    def __init__(self, stand: Stand) -> None:
        """Starts nothing."""
        self._stand = stand
        self._is_built = False
        self._pace = stand.folder / "pace"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Services]:
        """Opens new connections: a client that outlived a fault would measure its own back-off."""
        async with connect(self._stand.targets, token=self._stand.token) as client:
            yield client

    async def start(self, name: str, victims: tuple[Victim, ...]) -> str:
        """Starts a run at a steady pace; its agents are commands for a keeper, its ranks exchange for an aggregator.

        Returns:
            `projects/{project}/trainingRuns/{id}`.
        """
        self._set_pace(PACE_S)
        folder = self._write_agent(victims)
        async with self.client() as client:
            run = await start_run(client, folder, name)
        self._is_built = True
        return run

    def hurry(self) -> None:
        """Lets agents answer at once from now on."""
        self._set_pace(0.0)

    def _set_pace(self, seconds: float) -> None:
        self._pace.write_text(str(seconds))
        self._pace.chmod(0o644)

    def _write_agent(self, victims: tuple[Victim, ...]) -> Path:
        folder = self._stand.folder / "agent"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(__file__).parent / "agent", folder)
        shutil.copy(REPOSITORY / "tests/chaos/agent/grader.py", folder)
        shutil.copy(REPOSITORY / "examples/arithmetic/make_model.py", folder)
        tasks = [{"input": {"question": f"{n}+{n}=", "pace_file": str(self._pace)}} for n in range(TASKS)]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
        by_command = Victim.KEEPER in victims
        text = CONFIG.format(
            # Later runs start from the newest version, so its engine stays.
            first="" if self._is_built else 'build = "make_model.py:build"',
            agent='command = ["python3", "agent.py"]' if by_command else 'python = "agent.py:play"',
            steps=STEPS,
            more=THROUGH_AGGREGATOR.format(port=self._stand.aggregator_port) if Victim.AGGREGATOR in victims else "",
        )
        (folder / "train.toml").write_text(text, encoding="utf-8")
        return folder

    async def judge(self, run: str, *, ended: bool) -> Verdict:
        """Reads the books of a run, through the services and directly in the database.

        Args:
            run: `projects/{project}/trainingRuns/{id}`.
            ended: Whether it has; what has not ended has books in the database only.
        """
        created = await self._count(CREATED, run)
        lost = await self._count(LOST, run)
        doubled = await self._count(DOUBLED, run)
        if not ended:
            return Verdict(created=created, lost=lost, doubled=doubled, retried={})
        async with asyncio.timeout(BOOKS_LIMIT_S), self.client() as client:
            books = await collect_books(client, run, self._stand.state.path)
        return _verdict(books, created=created, lost=lost, doubled=doubled)

    async def _count(self, sql: str, run: str) -> int:
        async with asyncio.timeout(BOOKS_LIMIT_S):
            while True:
                try:
                    return int((await self._stand.query(sql, run))[0][0])
                except OSError:
                    await asyncio.sleep(0.2)  # PostgreSQL may be recovering.


def _verdict(books: Books, *, created: int, lost: int, doubled: int) -> Verdict:
    problems = problems_of(books, calls_per_rollout=TURNS, min_reward=MIN_REWARD)
    consumed = [name for line in books.consumed for name in line["rollouts"]]
    trained = Counter(name for line in books.consumed for name in line["trained"])
    fed = Counter(group for group, _ in books.feed)
    order = [group for group, _ in books.feed if group.startswith(TRAIN_PREFIX)]
    done = {f"{TRAIN_PREFIX}{line['group']}" for line in books.consumed}
    last = max((order.index(group) for group in done if group in order), default=-1)
    return Verdict(
        created=created,
        lost=lost + max(0, created - len(books.rollouts)),
        doubled=doubled + _repeats(Counter(consumed)) + _repeats(fed),
        skipped=sum(group not in done for group in order[: last + 1]),
        trained_twice=_repeats(trained),
        failed=sum(problem.split(": ", 1)[-1].startswith("failed: ") for problem in problems),
        retried=dict(failure_counts(books)),
        problems=tuple(problems[:8]),
    )


def _repeats(counted: Counter[str]) -> int:
    return sum(count > 1 for count in counted.values())
