"""Projects (tenants) and the tokens issued for them."""
