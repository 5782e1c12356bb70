"""Translates calls of one API to another, by way of chat completions."""
