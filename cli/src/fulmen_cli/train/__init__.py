"""`fulmen train`: from a `train.toml` to a trained model."""
