"""Models: their files, transfers, cards and names."""
