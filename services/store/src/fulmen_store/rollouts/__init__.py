"""Rollouts: creation, cancellation, retries, lists and the completion feed."""
