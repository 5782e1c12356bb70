"""Models that clients upload, and the weights that they download."""
