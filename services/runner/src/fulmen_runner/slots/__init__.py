"""How many attempts run at once."""
