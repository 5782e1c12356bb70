"""Reads a command line of vLLM by vLLM's own parser, and starts nothing. Runs in vLLM's environment, not in Fulmen's."""

from __future__ import annotations

import json
import sys

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="vllm")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    arguments = parser.parse_args(sys.argv[1:])
    command.validate(arguments)
    plain = {name: value for name, value in vars(arguments).items() if isinstance(value, str | int | float | bool)}
    print(json.dumps(plain))
