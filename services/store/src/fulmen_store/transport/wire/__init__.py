"""Conversions between messages and records."""
