"""What a file owns: its routes and backends become equal to its contents, and are changed in no other way.

Invariant: nothing of a set is published unless all of it is valid. More changes than the store accepts in one request are
published in an order in which every route finds its backends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from fulmen.errors import ArgumentInvalid, ManagedByFile, Violation
from fulmen.kinds import policy_problem
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen_llm_proxy.routing.codec import (
    BACKEND_KIND,
    ROUTE_KIND,
    backend_resource,
    decode_backend,
    decode_route,
    parse_backend,
    parse_route,
    route_resource,
)
from fulmen_llm_proxy.routing.resources import ResourceWriter

MAX_ENTRIES: Final = 1000
MAX_AT_ONCE: Final = 64
"""The store's limit per publication."""

_FILE: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_Entry = TypeVar("_Entry", backend_pb2.Backend, route_pb2.Route)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSet:
    """All backends and routes of a file; the set is empty to delete what it owns."""

    file: str
    backends: Sequence[backend_pb2.Backend]
    routes: Sequence[route_pb2.Route]


@dataclass(frozen=True, slots=True)
class FileChanges:
    """Names of what was added, replaced and deleted, in the order in which it was published."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Held:
    """What there is, by name."""

    backends: Mapping[str, backend_pb2.Backend]
    routes: Mapping[str, route_pb2.Route]


def require_unowned(entry: backend_pb2.Backend | route_pb2.Route) -> None:
    """Checks that a route or backend may be changed by a request.

    Raises:
        ManagedByFile: if a file owns it.
    """
    if entry.file:
        raise ManagedByFile(
            f"The file {entry.file} owns {entry.name}: change it there, then run `fulmen proxy apply {entry.file}`.",
            name=entry.name,
            file=entry.file,
        )


class OwnedFiles:
    """Publishes the sets of files."""

    def __init__(self, writer: ResourceWriter) -> None:
        self._writer = writer

    async def apply(self, wanted: FileSet) -> FileChanges:
        """Makes what the file owns its set.

        Raises:
            ArgumentInvalid: if the set is not valid, or names what it may not own; lists every problem.
            Unavailable: if the store cannot be reached; what is left is published by the next call.
        """
        changes = FileChanges()
        self._writer.tables.require_loaded()
        async with self._writer.changing:
            await self._writer.refresh()
            while True:
                published: dict[str, bytes] = {}

                def next_ones(published: dict[str, bytes] = published) -> dict[str, bytes]:
                    published.clear()
                    published.update(islice(_differences(self._checked(wanted), wanted), MAX_AT_ONCE))
                    return published

                before = self._held()
                await self._writer.change(next_ones)
                if not published:
                    return changes
                _note(changes, before, published)

    def _checked(self, wanted: FileSet) -> _Held:
        """Returns what there is.

        Raises:
            ArgumentInvalid: if the set is not valid together with it.
        """
        held = self._held()
        if problems := [*_set_problems(wanted), *_conflicts(wanted, held)]:
            raise ArgumentInvalid(f"The file {wanted.file[:100]} cannot be applied.", violations=problems)
        return held

    def _held(self) -> _Held:
        resources = self._writer.resources
        backends = [parse_backend(each.content) for each in resources.of_kind(BACKEND_KIND).values()]
        routes = [parse_route(each.content) for each in resources.of_kind(ROUTE_KIND).values()]
        return _Held({each.name: each for each in backends}, {each.name: each for each in routes})


def _set_problems(wanted: FileSet) -> Iterable[Violation]:
    """Yields the problems of a set on its own."""
    if not _FILE.fullmatch(wanted.file):
        yield Violation(field="file", description=f"is not of the form {_FILE.pattern}")
    kinds: dict[str, Sequence[backend_pb2.Backend] | Sequence[route_pb2.Route]] = {
        "backends": wanted.backends,
        "routes": wanted.routes,
    }
    for kind, entries in kinds.items():
        if len(entries) > MAX_ENTRIES:
            yield Violation(field=kind, description=f"has more than {MAX_ENTRIES} entries")
        for name, count in Counter(each.name for each in entries).items():
            if count > 1:
                yield Violation(field=kind, description=f"{name} occurs {count} times")
    for index, backend in enumerate(wanted.backends[:MAX_ENTRIES]):
        yield from _decoded(decode_backend, backend, f"backends[{index}]")
    backends, routes = {each.name: each for each in wanted.backends}, {each.name for each in wanted.routes}
    for index, route in enumerate(wanted.routes[:MAX_ENTRIES]):
        where = f"routes[{index}]"
        yield from _decoded(decode_route, route, where)
        yield from _target_problems(route, where, backends)
        for at, name in enumerate(route.fallbacks):
            if name not in routes:
                yield Violation(
                    field=f"{where}.fallbacks[{at}]", description=f"{name[:150]!r} is not a route of the file"
                )


def _target_problems(
    route: route_pb2.Route, where: str, backends: Mapping[str, backend_pb2.Backend]
) -> Iterable[Violation]:
    for at, target in enumerate(route.targets):
        if target.backend not in backends:
            text = f"{target.backend[:100]!r} is not a backend of the file"
            yield Violation(field=f"{where}.targets[{at}].backend", description=text)
        elif target.policy and (problem := policy_problem(backends[target.backend])):
            yield Violation(field=f"{where}.targets[{at}].policy", description=problem)


def _decoded(decode: Callable[[_Entry], object], entry: _Entry, where: str) -> Iterable[Violation]:
    """Yields the violations of one entry, by its place in the set."""
    try:
        decode(entry)
    except ArgumentInvalid as error:
        for each in error.violations:
            yield Violation(field=f"{where}.{each.field.partition('.')[2]}", description=each.description)


def _conflicts(wanted: FileSet, held: _Held) -> Iterable[Violation]:
    """Yields what keeps a set from what there is: owners of its names, and users of what it deletes."""
    yield from _taken("backends", wanted.file, wanted.backends, held.backends)
    yield from _taken("routes", wanted.file, wanted.routes, held.routes)
    kept = {each.name: each for each in wanted.backends}
    deleted = {name for name, each in held.backends.items() if each.file == wanted.file} - kept.keys()
    routes = {each.name for each in wanted.routes}
    for route in held.routes.values():
        if route.file != wanted.file and route.name not in routes:
            for name in sorted({target.backend for target in route.targets} & deleted):
                yield Violation(
                    field="backends", description=f"{name} is in use by {route.name}, which the file does not own"
                )
            for name in sorted({target.backend for target in route.targets if target.policy} & kept.keys()):
                if problem := policy_problem(kept[name]):
                    yield Violation(field="backends", description=f"{name}: the policy of {route.name} {problem}")


def _taken(kind: str, file: str, entries: Sequence[_Entry], held: Mapping[str, _Entry]) -> Iterable[Violation]:
    """Yields the names that belong to a training run or to another file."""
    for index, entry in enumerate(entries):
        other = held.get(entry.name)
        if other is not None and other.file != file and (other.file or other.project):
            owner = other.file or f"a training run of {other.project}"
            yield Violation(field=f"{kind}[{index}].name", description=f"{entry.name} belongs to {owner}")


def _differences(held: _Held, wanted: FileSet) -> Iterable[tuple[str, bytes]]:
    """Yields what to publish by resource: backends before the routes that need them, and deletions the other way round."""
    for backend in wanted.backends:
        new = _owned_backend(backend, wanted.file, held.backends.get(backend.name))
        if held.backends.get(backend.name) != new:
            yield backend_resource(new.name.removeprefix("backends/")), new.SerializeToString(deterministic=True)
    for route in wanted.routes:
        made = _owned_route(route, wanted.file, held.routes.get(route.name))
        if held.routes.get(route.name) != made:
            yield route_resource(made.name.removeprefix("routes/")), made.SerializeToString(deterministic=True)
    for name in _left_over(held.routes.values(), wanted.routes, wanted.file):
        yield route_resource(name.removeprefix("routes/")), b""
    for name in _left_over(held.backends.values(), wanted.backends, wanted.file):
        yield backend_resource(name.removeprefix("backends/")), b""


def _left_over(held: Iterable[_Entry], wanted: Iterable[_Entry], file: str) -> list[str]:
    names = {each.name for each in wanted}
    return [each.name for each in held if each.file == file and each.name not in names]


def _owned_backend(wanted: backend_pb2.Backend, file: str, present: backend_pb2.Backend | None) -> backend_pb2.Backend:
    """Returns a backend of a file; a drain or hold continues, unless another engine replaces it."""
    owned = backend_pb2.Backend()
    owned.CopyFrom(wanted)
    owned.file = file
    for name in ("project", "draining", "stale_version", "hold_until_time"):
        owned.ClearField(name)
    if present is not None:
        owned.draining = present.draining
        if present.base_url == wanted.base_url:
            owned.stale_version = present.stale_version
            if present.HasField("hold_until_time"):
                owned.hold_until_time.CopyFrom(present.hold_until_time)
    return owned


def _owned_route(wanted: route_pb2.Route, file: str, present: route_pb2.Route | None) -> route_pb2.Route:
    """Returns a route of a file; its targets keep the policy versions that were promoted."""
    owned = route_pb2.Route()
    owned.CopyFrom(wanted)
    owned.file, owned.version = file, 0
    owned.ClearField("project")
    served = {(each.backend, each.policy): each.policy_version for each in (() if present is None else present.targets)}
    for target in owned.targets:
        if target.policy:
            target.policy_version = served.get((target.backend, target.policy), target.policy_version)
    return owned


def _note(changes: FileChanges, before: _Held, published: Mapping[str, bytes]) -> None:
    for resource_id, content in published.items():
        kind, _, rest = resource_id.partition(".")
        name = f"{kind}s/{rest}"
        present = name in before.backends or name in before.routes
        (changes.deleted if not content else changes.changed if present else changes.added).append(name)
