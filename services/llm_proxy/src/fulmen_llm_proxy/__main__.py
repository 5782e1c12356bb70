"""`python -m fulmen_llm_proxy serve|config`."""

from __future__ import annotations

from fulmen_service_kit.importing import without_collector

with without_collector():
    from fulmen_llm_proxy.app import build
    from fulmen_llm_proxy.settings import LlmProxySettings
    from fulmen_llm_proxy.workers.supervisor import run
    from fulmen_service_kit.cli import service_cli

main = service_cli(LlmProxySettings, build, run=run)

if __name__ == "__main__":
    main()
