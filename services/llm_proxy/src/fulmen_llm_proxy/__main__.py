"""`python -m fulmen_llm_proxy serve|config`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulmen_service_kit.importing import without_collector

with without_collector():
    from fulmen_llm_proxy.settings import LlmProxySettings
    from fulmen_llm_proxy.workers.supervisor import run
    from fulmen_service_kit.cli import service_cli

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from fulmen_service_kit.lifecycle import ServiceParts
    from fulmen_service_kit.settings import ServiceSettings


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Builds the proxy, as `app.build` does."""
    # A supervisor of workers builds none, and would keep 18 MB for it.
    with without_collector():
        from fulmen_llm_proxy import app

    return await app.build(settings, stack)


main = service_cli(LlmProxySettings, build, run=run)

if __name__ == "__main__":
    main()
