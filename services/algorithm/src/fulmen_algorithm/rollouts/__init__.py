"""A run's rollouts: admission, submission, completion and trajectories. No wire, no database."""
