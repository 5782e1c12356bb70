"""Makes the guards that the settings name."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp
from prometheus_client import CollectorRegistry

from fulmen_llm_proxy.guards.checkers import FunctionChecker, WebhookChecker
from fulmen_llm_proxy.guards.guard import Guard, Guards, Phase
from fulmen_llm_proxy.metrics.guards import GuardMetrics
from fulmen_llm_proxy.settings import GuardSettings
from fulmen_service_kit.errors import StartupError


def open_guards(
    settings: Sequence[GuardSettings], session: aiohttp.ClientSession, registry: CollectorRegistry
) -> Guards:
    """Returns the guards, in order.

    Raises:
        StartupError: if entry points are missing or are not guards; names all of them.
    """
    guards, problems = [], []
    for each in settings:
        try:
            checker = WebhookChecker(session, each.url) if each.url else FunctionChecker.load(each.entry_point)
        except Exception as error:  # noqa: BLE001 - the operator's code, when it is imported
            problems.append(f"guard {each.name}: {error}")
            continue
        guards.append(
            Guard(
                name=each.name,
                checker=checker,
                phases=frozenset(map(Phase, each.phases)),
                deadline_s=each.deadline_s,
                refuses_on_failure=each.on_failure == "refuse",
            )
        )
    if problems:
        raise StartupError("; ".join(problems))
    return Guards(guards, GuardMetrics(registry))
