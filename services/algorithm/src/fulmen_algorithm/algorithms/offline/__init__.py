"""Algorithms on data that exist: pairs of answers, and stored rollouts with their rewards. No rollout is made."""
