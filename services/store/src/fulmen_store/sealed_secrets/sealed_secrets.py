"""Sets, lists, deletes and opens secrets; seals them again after the signing key has changed.

Invariant: a value is in the database only sealed, bound to its project, name and hosts, and leaves the store only for
the attempt whose agent names it or, sealed with a key of the proxy's, as a key of backends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from fulmen.errors import ArgumentInvalid, DatabaseUnavailable, QuotaExceeded, SecretNotFound, Violation
from fulmen.secret_names import (
    MAX_BACKEND_KEY_BYTES,
    MAX_HOST,
    MAX_HOSTS,
    MAX_SECRETS,
    MAX_VALUE_BYTES,
    MIN_VALUE_BYTES,
    is_backend_key,
    name_problem,
    place,
)
from fulmen_service_kit.security.sealing import CannotOpen, Sealer
from fulmen_store.sealed_secrets.table import SealedSecret, SecretTable, SecretView

__all__ = ["NewSecret", "SecretResealer", "Secrets"]

RESEAL_INTERVAL_S: Final = 1.0
RESEAL_COUNT: Final = 100
MAX_NAME: Final = 64

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSecret:
    """A secret as requested."""

    project_id: int
    project: str
    name: str
    value: bytes = field(repr=False)
    hosts: tuple[str, ...]


class Secrets:
    """Secrets of projects."""

    def __init__(self, *, table: SecretTable, sealer: Sealer) -> None:
        """Creates the use cases; `sealer` seals what is stored."""
        self._table = table
        self._sealer = sealer

    async def set(self, new: NewSecret) -> SecretView:
        """Sets a secret, new or not.

        Raises:
            ArgumentInvalid: If it is malformed; lists every problem.
            QuotaExceeded: If the project has the maximum number of secrets.
        """
        violations = list(_problems(new))
        if violations:
            raise ArgumentInvalid("The secret cannot be set.", violations=violations)
        sealed = SealedSecret(
            project_id=new.project_id,
            project=new.project,
            name=new.name,
            hosts=new.hosts,
            sealed=self._sealer.seal(new.value, about=place(new.project, new.name, new.hosts)),
        )
        view = await self._table.set(sealed, key_id=sealed.sealed[: len(self._sealer.key_id)], max_count=MAX_SECRETS)
        if view is None:
            raise QuotaExceeded(
                f"The project has {MAX_SECRETS} secrets, the maximum. Delete one with `fulmen secret remove`.",
                project=new.project,
                quota="secrets",
            )
        return view

    async def delete(self, project_id: int, name: str) -> None:
        """Deletes a secret.

        Raises:
            SecretNotFound: If it does not exist.
        """
        if name_problem(name) or not await self._table.delete(project_id, name):
            raise SecretNotFound("The secret does not exist.", secrets=name[:MAX_NAME])

    async def values(self, project_id: int, project: str, names: Sequence[str]) -> dict[str, bytes]:
        """Returns the values of variables of agents by name.

        Raises:
            SecretNotFound: If any does not exist, is a key of backends, or can no longer be decrypted; names them all.
        """
        wanted = {name for name in names if not name_problem(name) and not is_backend_key(name)}
        found = await self._table.sealed(project_id, project, sorted(wanted)) if wanted else []
        values = {each.name: value for each in found if (value := self._opened(each)) is not None}
        missing = sorted({name[:MAX_NAME] for name in names} - values.keys())
        if missing:
            text = f"Secrets do not exist, or can no longer be decrypted: {', '.join(missing)}. Set them again."
            raise SecretNotFound(text, secrets=",".join(missing))
        return values

    async def backend_keys(self, project_id: int, project: str, *, sealer: Sealer) -> list[SealedSecret]:
        """Returns the keys of backends, sealed for the proxy; those that can no longer be decrypted are left out."""
        found = []
        for each in await self._table.backend_keys(project_id, project):
            value = self._opened(each)
            if value is not None:
                sealed = sealer.seal(value, about=place(project, each.name, each.hosts))
                found.append(
                    SealedSecret(
                        project_id=project_id, project=project, name=each.name, hosts=each.hosts, sealed=sealed
                    )
                )
        return found

    def _opened(self, secret: SealedSecret) -> bytes | None:
        try:
            return self._sealer.open(secret.sealed, about=place(secret.project, secret.name, secret.hosts))
        except CannotOpen:
            _log.warning("secret_not_decrypted", project=secret.project, secret=secret.name)
            return None


class SecretResealer:
    """Background role: seals values with the signing key of today that were sealed with one of its predecessors."""

    def __init__(self, *, table: SecretTable, sealer: Sealer) -> None:
        self._table = table
        self._sealer = sealer

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                while await self.reseal_once():
                    pass
            await asyncio.sleep(RESEAL_INTERVAL_S)

    async def reseal_once(self) -> int:
        """Seals some values; returns their number."""
        older = self._sealer.older_key_ids
        if not older:
            return 0
        found = await self._table.of_keys(older, limit=RESEAL_COUNT)
        count = 0
        for each in found:
            about = place(each.project, each.name, each.hosts)
            with contextlib.suppress(CannotOpen):
                sealed = self._sealer.seal(self._sealer.open(each.sealed, about=about), about=about)
                await self._table.reseal(each, key_id=sealed[: len(self._sealer.key_id)], sealed=sealed)
                count += 1
        if count:
            _log.info("secrets_sealed_anew", count=count)
        return count


def _problems(new: NewSecret) -> Iterator[Violation]:
    if problem := name_problem(new.name):
        yield _violation("name", f"{new.name[:MAX_NAME]!r} {problem}")
    is_key = is_backend_key(new.name)
    most_bytes = MAX_BACKEND_KEY_BYTES if is_key else MAX_VALUE_BYTES
    if not MIN_VALUE_BYTES <= len(new.value) <= most_bytes:
        yield _violation("value", f"has {len(new.value)} bytes, allowed are {MIN_VALUE_BYTES} to {most_bytes}")
    if not _is_text(new.value) or b"\0" in new.value:
        yield _violation("value", "is not UTF-8 without NUL")
    if is_key and not _is_header(new.value):
        yield _violation("value", "cannot be sent in a header: a backend's key has printable ASCII characters only")
    if is_key and not 1 <= len(new.hosts) <= MAX_HOSTS:
        yield _violation("hosts", f"has {len(new.hosts)} entries; a backend's key needs 1 to {MAX_HOSTS}")
    if not is_key and new.hosts:
        yield _violation("hosts", "is for keys of backends only, whose names have no capitals")
    for host in new.hosts[:MAX_HOSTS]:
        if not 1 <= len(host) <= MAX_HOST or not host.isascii() or not host.isprintable() or set(host) & set(" /@\\"):
            yield _violation(
                "hosts", f"{host[:MAX_NAME]!r} is not a host, such as api.openai.com or *.example.com:8000"
            )


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_header(value: bytes) -> bool:
    return value.isascii() and value.decode("ascii").isprintable()


def _violation(path: str, description: str) -> Violation:
    return Violation(field=path, description=description)
