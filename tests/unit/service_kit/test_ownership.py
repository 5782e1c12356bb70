"""Leftovers of dead services are removed and those of live ones are not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import psutil

from fulmen_service_kit.ownership import Owner, deadline_of

NOW = 1_800_000_000.0


def left(owner: Owner, process: str, *, host: str = "", deadline_unix_s: float = NOW + 1) -> bool:
    return owner.is_leftover(host=host or owner.host, process=process, deadline_unix_s=deadline_unix_s, now_unix_s=NOW)


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_what_is_left_behind_is_that_of_the_dead_and_what_is_overdue() -> None:
    me = Owner.this_process("here")
    _, born, namespace = me.process.split("-")
    assert not left(me, me.process)
    assert left(me, me.process, deadline_unix_s=NOW - 1)
    assert left(me, f"{dead_process()}-{born}-{namespace}")
    # A process that has the number of a dead one.
    assert left(me, f"{os.getpid()}-{int(born) - 100}-{namespace}")
    parent = psutil.Process(os.getppid())
    assert not left(me, f"{parent.pid}-{int(parent.create_time())}-{namespace}")


def test_the_services_of_other_hosts_and_namespaces_are_not_judged() -> None:
    me = Owner.this_process("here")
    gone = f"{dead_process()}-1-{me.process.rpartition('-')[2]}"
    assert not left(me, gone, host="there")
    assert not left(me, "1-1-1")
    assert not left(me, "nonsense")
    # Docker gives this name to one container only: another namespace is an earlier life of it.
    assert left(replace(me, host="0123456789ab"), "1-1-1")
    # So does a cluster with the name of a pod.
    assert left(Owner.this_process("fulmen-algorithm-0", is_only_host=True), "1-1-1")


def test_a_deadline_that_cannot_be_read_never_comes() -> None:
    assert deadline_of({"at": "17"}, "at") == 17
    assert deadline_of({"at": "soon"}, "at") == deadline_of({}, "at") == float("inf")
