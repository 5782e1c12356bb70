"""Usage of model calls, and the rate limits that proxies share."""
