"""`fulmen train`: from a `train.toml` to a trained model, in steps that each do one thing."""
