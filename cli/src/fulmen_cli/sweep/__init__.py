"""`fulmen sweep`: settings of a `train.toml` are compared by successive halving."""
