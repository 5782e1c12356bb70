"""The command line `fulmen`: starts the local stack, trains agents, and inspects every service."""
