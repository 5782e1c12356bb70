"""`fulmen project`, `token`, `usage`: tenants, their tokens and what they used."""
