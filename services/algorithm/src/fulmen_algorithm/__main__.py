"""Command line of the algorithm service: `python -m fulmen_algorithm serve` and `config`."""

from fulmen_algorithm.app import build
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_service_kit.cli import service_cli

main = service_cli(AlgorithmServiceSettings, build)

if __name__ == "__main__":
    main()
