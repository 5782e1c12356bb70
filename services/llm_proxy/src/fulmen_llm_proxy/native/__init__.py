"""Compiled functions of the proxy, and what loads them."""
