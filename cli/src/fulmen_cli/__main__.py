"""Runs the command line as `python -m fulmen_cli`."""

from fulmen_cli.entry import main

if __name__ == "__main__":
    main()
