"""Annotations: scores that people give to rollouts, and how far these people agree."""
