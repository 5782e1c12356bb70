"""Sweeps: many settings of one `train.toml` are tried for a few steps, and the best of them for longer."""
