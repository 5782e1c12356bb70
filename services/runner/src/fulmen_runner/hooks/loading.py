"""Loads the hooks named in the settings."""

import inspect
import pkgutil
from collections.abc import Sequence

from fulmen.errors import SettingsInvalid, Violation
from fulmen_runner.attempts.hooks import NamedHook

POINTS = ("on_rollout_start", "on_trace_start", "on_trace_end", "on_rollout_end")


def load_hooks(targets: Sequence[str]) -> tuple[NamedHook, ...]:
    """Loads hooks from `module:name` targets, each an instance or a class without constructor arguments.

    Raises:
        SettingsInvalid: If a hook cannot be loaded; lists all of them.
    """
    loaded: list[NamedHook] = []
    violations: list[Violation] = []
    for target in targets:
        try:
            loaded.append(NamedHook(name=target, hook=_loaded(target)))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # The operator's code may raise anything.
            text = str(error) if isinstance(error, _NoHook) else f"{type(error).__name__}: {error}"
            violations.append(Violation(field="FULMEN_RUNNER_HOOKS", description=f"{target}: {text}"))
    if violations:
        raise SettingsInvalid("hooks cannot be loaded", violations=violations)
    return tuple(loaded)


class _NoHook(Exception):
    """The target is not a hook."""


def _loaded(target: str) -> object:
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise _NoHook("must have the form `module:name`")
    found = pkgutil.resolve_name(target)
    hook = found() if inspect.isclass(found) else found
    methods = {point: getattr(hook, point, None) for point in POINTS}
    if all(method is None for method in methods.values()):
        raise _NoHook(f"has none of the methods {', '.join(POINTS)}")
    for point, method in methods.items():
        if method is not None and not inspect.iscoroutinefunction(method):
            raise _NoHook(f"{point} is not an async method")
    return hook
