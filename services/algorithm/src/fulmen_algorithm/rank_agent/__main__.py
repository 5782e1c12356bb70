"""Command line: `fulmen-rank serve` and `config`."""

from fulmen_algorithm.rank_agent.app import build
from fulmen_algorithm.rank_agent.settings import RankAgentSettings
from fulmen_service_kit.cli import service_cli

main = service_cli(RankAgentSettings, build)

if __name__ == "__main__":
    main()
