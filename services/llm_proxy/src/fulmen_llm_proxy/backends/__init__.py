"""Model servers: how they are reached, what they are sent, how they are probed and held."""
