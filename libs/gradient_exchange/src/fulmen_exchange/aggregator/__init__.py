"""The sharded aggregator: who takes part in an exchange, and what becomes of each payload."""
