"""Policies: what a round of the exchange does, decided from numbers that all ranks have."""
