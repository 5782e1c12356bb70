"""The blocking Python API, made by `tools/sync_client.py` of `fulmen.client.aio`."""
