"""Leases of training runs as values, and what their holders may ask for."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from fulmen.errors import ArgumentInvalid, Violation

__all__ = ["Holder", "NewRun", "Renewal", "RunFence", "RunLease", "RunLeaseState", "check_holder", "require_valid"]

MIN_TTL_S: Final = 1.0
MAX_TTL_S: Final = 600.0
MAX_ADDRESS: Final = 260
MAX_RECORD_BYTES: Final = 1024 * 1024
MAX_POLICY: Final = 63
MAX_REQUEST_ID: Final = 128
MAX_STORAGE: Final = 64
MAX_EPOCH: Final = 2**62
_OWNER: Final = re.compile(r"[A-Za-z0-9-]{1,64}")


class RunLeaseState(IntEnum):
    """What a run is for its owners; numbers as in the protos."""

    IDLE = 1
    WAITING = 2
    RUNNING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFence:
    """The epoch under which a caller runs a training run; see `fulmen.store.v1.RunFence`."""

    training_run: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """An algorithm service that acquires or renews leases.

    Attributes:
        owner: Its id, kept over restarts.
        address: `host:port` at which the others reach it.
        ttl_s: Time without a renewal after which its leases expire, seconds.
        storage: Id of the storage that holds its runs' files.
    """

    owner: str
    address: str
    ttl_s: float
    storage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """A lease to renew; an empty record leaves the stored one."""

    project_id: int
    training_run: str
    epoch: int
    record: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to record; fields as in `fulmen.store.v1.CreateRunLeaseRequest`."""

    training_run: str
    policy: str
    record: bytes
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLease:
    """A training run and its lease; fields as in `fulmen.store.v1.RunLease`."""

    project_id: int
    training_run: str
    policy: str
    state: RunLeaseState
    owner: str
    owner_address: str
    epoch: int
    held: bool
    expires_at: datetime.datetime
    updated_at: datetime.datetime
    record: bytes
    storage: str


def check_holder(holder: Holder) -> list[Violation]:
    """Returns every problem of a holder."""
    found = []
    if not _OWNER.fullmatch(holder.owner):
        found.append(Violation(field="owner", description="must be 1 to 64 of [A-Za-z0-9-]"))
    if not 0 < len(holder.address) <= MAX_ADDRESS:
        found.append(Violation(field="owner_address", description=f"must have 1 to {MAX_ADDRESS} characters"))
    if not MIN_TTL_S <= holder.ttl_s <= MAX_TTL_S:
        text = f"is {holder.ttl_s:g} s, allowed are {MIN_TTL_S:g} to {MAX_TTL_S:g}"
        found.append(Violation(field="ttl", description=text))
    if len(holder.storage) > MAX_STORAGE:
        found.append(Violation(field="storage", description=f"is longer than {MAX_STORAGE} characters"))
    return found


def check_epoch(field: str, epoch: int) -> list[Violation]:
    """Returns the problem of an epoch, if it has one."""
    if 0 <= epoch <= MAX_EPOCH:
        return []
    return [Violation(field=field, description=f"is {epoch}, allowed are 0 to {MAX_EPOCH}")]


def check_record(field: str, record: bytes) -> list[Violation]:
    """Returns the problem of a record, if it has one."""
    if len(record) <= MAX_RECORD_BYTES:
        return []
    return [Violation(field=field, description=f"has {len(record)} bytes, allowed are {MAX_RECORD_BYTES}")]


def require_valid(violations: Iterable[Violation]) -> None:
    """Checks that a request has no problem.

    Raises:
        ArgumentInvalid: With every problem.
    """
    if found := list(violations):
        raise ArgumentInvalid("The request is not valid.", violations=found)
