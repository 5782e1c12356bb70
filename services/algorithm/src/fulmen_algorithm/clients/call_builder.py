"""Calls a function of a bundle that builds a model: FILE, NAME, OUTPUT, SEED, in the folder of the bundle.

A fork of the fork server runs it as a module, with torch in place; a further argument says how it is confined, as that of
`confine` does. Elsewhere a fresh interpreter, which is confined already, is given its text.
"""

import importlib.util
import json
import os
import sys


def main() -> None:
    """Calls the function."""
    file, name, output, seed, *confinement = sys.argv[1:]
    os.dup2(1, 2)
    if confinement:
        from fulmen_service_kit.isolation import confine  # a sandbox need not have it

        confine.fork_supervised()
        confine.confine(json.loads(confinement[0]), os.environ)
    if torch := sys.modules.get("torch"):
        # It was loaded before it could read this variable.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.path.insert(0, ".")
    spec = importlib.util.spec_from_file_location("policy_build", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["policy_build"] = module
    spec.loader.exec_module(module)
    getattr(module, name)(output, seed=int(seed))


if __name__ == "__main__":
    main()
