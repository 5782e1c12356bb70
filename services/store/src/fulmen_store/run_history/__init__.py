"""The history of training runs: curves, distributions of rewards, notices."""
