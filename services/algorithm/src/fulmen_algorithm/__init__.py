"""The algorithm service: training runs, their rollouts, their policies."""
