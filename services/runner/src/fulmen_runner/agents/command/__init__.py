"""Agents that are commands, and what keeps them."""
