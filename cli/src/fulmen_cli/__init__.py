"""The command line `fulmen`: starts the local stack, trains agents, and looks into every service."""
