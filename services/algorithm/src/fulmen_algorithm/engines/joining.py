"""Adds joining engines of other machines to the runs of this service."""

from fulmen.errors import TrainingRunStateInvalid
from fulmen_algorithm.engines.joined import JoinedEngine
from fulmen_algorithm.engines.peers import PeerTree
from fulmen_algorithm.engines.pool import EnginePool
from fulmen_algorithm.runs.registry import RunRegistry


class RunEngines:
    """The engines of the runs of this service."""

    def __init__(self, runs: RunRegistry, pool: EnginePool, *, fan_out: int) -> None:
        """`fan_out` is the fan-out of the trees in which joined engines fetch versions from each other; see
        `peers`."""
        self._runs = runs
        self._pool = pool
        self._fan_out = fan_out
        self._trees: dict[str, PeerTree] = {}

    def owner_of(self, training_run: str) -> str:
        """Returns the address of the service that runs a run; empty if this one does, or none.

        Raises:
            TrainingRunNotFound: if there is no such run.
        """
        return self._runs.owner_of(training_run)

    async def serve_with(self, training_run: str, engine: JoinedEngine) -> None:
        """Serves a run's policy with an engine until it leaves, or the run's engines do.

        Raises:
            TrainingRunNotFound: if there is no such run.
            TrainingRunStateInvalid: if the run has ended, or its engines are external.
            EngineExists: if another engine of the run has the id.
            Unavailable: if the run serves nothing yet, or the engine does not take its weights.
        """
        run = self._runs.entry(training_run).run
        if run.state.final and not self._pool.awaits(training_run, engine.about.engine_id):
            raise TrainingRunStateInvalid(f"{training_run} has ended.", training_run=training_run, state=run.state)
        tree = self._trees.setdefault(training_run, PeerTree(self._fan_out))
        tree.join(engine)
        engine.tree = tree
        try:
            await self._pool.join(training_run, engine)
        finally:
            tree.leave(engine)
            if not len(tree):
                self._trees.pop(training_run, None)
