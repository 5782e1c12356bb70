"""Vendors whose API the proxy does not speak itself, called through LiteLLM in processes of their own."""
