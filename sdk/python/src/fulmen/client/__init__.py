"""The Python API: `fulmen.Client`, `fulmen.AsyncClient` and what they return.

`aio` holds the implementation; `sync` is generated from it by `tools/sync_client.py` and blocks on the same calls.
Records are views of the contract's messages, which are their attribute `proto`.
"""
