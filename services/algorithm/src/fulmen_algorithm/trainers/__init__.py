"""Where a run's weights are trained: implementations of `domain.trainer.Trainer`."""
