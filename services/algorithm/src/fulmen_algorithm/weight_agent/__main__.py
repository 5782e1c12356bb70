"""Command line of the weight agent: `fulmen-weight-agent serve` and `config`."""

from fulmen_algorithm.weight_agent.app import build
from fulmen_algorithm.weight_agent.settings import WeightAgentSettings
from fulmen_service_kit.cli import service_cli

main = service_cli(WeightAgentSettings, build)

if __name__ == "__main__":
    main()
