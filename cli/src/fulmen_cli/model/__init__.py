"""Trained models: what they need, where they came from, and taking them elsewhere."""
