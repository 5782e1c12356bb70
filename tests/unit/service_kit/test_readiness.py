"""A service is ready when its needed parts are; optional parts are only reported."""

from __future__ import annotations

import json

from fulmen_service_kit.readiness import Readiness


def test_a_service_is_as_ready_as_what_it_needs() -> None:
    readiness = Readiness()
    database, cache = "", ""
    readiness.add("database", lambda: database)
    readiness.add("cache", lambda: cache, is_needed=False)
    assert readiness.report() == (True, {"database": "ok", "cache": "ok"})
    cache = "it is slow"
    assert readiness.report() == (True, {"database": "ok", "cache": "it is slow"})
    database = "it does not answer"
    ready, body = readiness.page()
    assert not ready
    assert json.loads(body) == {"ready": False, "parts": {"database": "it does not answer", "cache": "it is slow"}}
