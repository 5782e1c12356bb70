"""`fulmen exchange`: the gradient exchange of a training run."""
