"""Searches for a better prompt of an agent: no weights are trained, and torch is not loaded."""
