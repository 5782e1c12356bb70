"""The asynchronous Python API, of which `fulmen.client.sync` is generated."""
