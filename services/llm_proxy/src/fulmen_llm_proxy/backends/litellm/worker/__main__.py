"""Runs the worker with the interpreter of LiteLLM's environment: `python -I PATH/TO/__main__.py`.

The package is found without a search path: the proxy's own libraries, of other versions, must not be found beside it.
"""

import sys
from pathlib import Path
from types import ModuleType


def main() -> None:
    """Makes the package known by its folder, without the modules of the proxy, then serves."""
    root = Path(__file__).parents[3]
    sys.modules[root.name] = package = ModuleType(root.name)
    package.__path__ = [str(root)]
    from fulmen_llm_proxy.backends.litellm.worker.process import run

    run()


if __name__ == "__main__":
    main()
