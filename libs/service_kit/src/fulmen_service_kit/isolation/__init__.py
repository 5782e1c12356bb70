"""Keeps code of tenants away from a service: levels of isolation, and the launch of a child at one of them."""
