"""Offers a machine that no cluster manages to one run, and starts the guardians of its ranks there."""
