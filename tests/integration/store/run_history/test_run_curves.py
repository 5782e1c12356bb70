"""`fulmen run compare` reads curves of the store, and events only of a run of which it has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from fulmen.rpc.services import Services
from fulmen_cli.run.compare import _shown_history
from tests.integration.store.run_history.test_run_history import RUN, append, owned, step
from tests.support.cli.run_events import SUCCEEDED, Event, RunService, run
from tests.support.cli.run_events import step as told
from tests.support.store.running import Stubs


@dataclass(frozen=True, slots=True)
class _Both:
    """The store's history, and a service of the run."""

    run_history: Any
    training_runs: Any


async def test_last_values_and_curves_of_a_long_run_are_those_that_the_store_has(stubs: Stubs) -> None:
    epoch = await owned(stubs)
    count = 2500
    for begin in range(1, count + 1, 500):
        await append(stubs, epoch, *(step(n, n, loss=1000 - n / 10, speed=n % 7) for n in range(begin, begin + 500)))
    # Its events say otherwise: they are not read.
    events = RunService([told(1, loss=5)], closes=True)

    found = await _shown_history(cast(Services, _Both(stubs.run_history, events)), RUN)

    assert found.metrics == {"loss": 1000 - count / 10, "speed": count % 7}
    curve = found.curve("loss")
    assert 1000 < len(curve) <= 2000
    assert (curve[0], curve[-1]) == ((1, 999.9), (count, 750.0))


async def test_a_run_that_the_store_has_no_history_of_is_read_from_its_events(stubs: Stubs) -> None:
    ended = Event(run=run(2, state=SUCCEEDED))
    events = RunService([told(1, loss=5), told(2, loss=4), ended], closes=True)
    found = await _shown_history(cast(Services, _Both(stubs.run_history, events)), RUN)
    assert found.curve("loss") == [(1, 5), (2, 4)]
