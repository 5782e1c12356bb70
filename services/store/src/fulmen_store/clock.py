"""The clocks of this process."""

from __future__ import annotations

import datetime
import time

__all__ = ["Clock"]


class Clock:
    """The clocks that use cases and background roles read; tests pass a subclass whose time they set."""

    monotonic_s = staticmethod(time.monotonic)
    unix_s = staticmethod(time.time)

    def utc_now(self) -> datetime.datetime:
        """Returns the time, in UTC."""
        return datetime.datetime.fromtimestamp(self.unix_s(), datetime.UTC)

    def utc_today(self) -> datetime.date:
        """Returns the date, in UTC."""
        return self.utc_now().date()
