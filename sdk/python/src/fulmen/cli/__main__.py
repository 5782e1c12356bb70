"""Runs the command line as `python -m fulmen.cli`."""

from fulmen.cli.entry import main

if __name__ == "__main__":
    main()
