"""Secrets of projects: encrypted values that only runners and the LLM proxy read."""
