"""What the runner serves."""
