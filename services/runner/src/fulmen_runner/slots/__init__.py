"""How many attempts run concurrently."""
