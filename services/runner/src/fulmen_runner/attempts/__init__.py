"""An attempt from its assignment to its outcome."""
