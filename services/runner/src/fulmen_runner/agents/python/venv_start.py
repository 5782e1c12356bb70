"""Starts a child in an agent's own virtual environment. Run by its path: the modules of the runner are not installed there.

Arguments: the folder of modules that come before the environment's packages, and that of those that come after them.
"""

import sys

if __name__ == "__main__":
    first, last = sys.argv[1:]
    sys.path.insert(0, first)
    sys.path.append(last)
    from fulmen_runner.agents.python.child_main import main

    main()
