"""Orders of people that come over the lease stream: carried out once, and confirmed."""

import structlog

from fulmen.store.v1 import lease_pb2
from fulmen_runner.attempts.drain import Drain
from fulmen_runner.attempts.pool import AttemptPool
from fulmen_runner.slots.keeper import SlotKeeper

MAX_SLOTS = 10_000

_log = structlog.get_logger()


class Orders:
    """Carries out orders.

    Invariant: an order is confirmed after it was carried out, and carried out once per session. What this runner does not
    understand is not carried out, and confirmed: it would not be better the next time.
    """

    def __init__(self, *, pool: AttemptPool, keeper: SlotKeeper, drain: Drain) -> None:
        self._pool = pool
        self._keeper = keeper
        self._drain = drain
        self._done: tuple[str, int] = ("", 0)
        self._unconfirmed = 0

    @property
    def has_news(self) -> bool:
        """Whether an order is to be confirmed."""
        return self._unconfirmed > 0

    def take_done(self) -> int:
        """Returns the number of the last order, to be confirmed; 0 if all are."""
        number, self._unconfirmed = self._unconfirmed, 0
        return number

    def carry_out(self, order: lease_pb2.RunnerOrder) -> None:
        """Carries out an order unless that was done before, and makes the stream confirm it."""
        runner = self._pool.session.runner
        known = self._done[1] if self._done[0] == runner else 0
        if order.number > known:
            _log.info("order_received", number=order.number, drains=order.HasField("drain"))
            self._done = (runner, order.number)
            if order.HasField("slots"):
                self._set_slots(order.slots)
            if order.HasField("drain"):
                grace = order.drain.grace.ToTimedelta().total_seconds() if order.drain.HasField("grace") else None
                self._drain.start(grace)
        self._unconfirmed = order.number
        self._pool.changed.set()

    def _set_slots(self, slots: lease_pb2.SlotOrder) -> None:
        if slots.automatic:
            self._keeper.automate()
        elif 1 <= slots.slot_count <= MAX_SLOTS:
            self._keeper.fix(slots.slot_count)
        else:
            _log.warning("order_not_understood", slot_count=slots.slot_count)
