"""Recorded model calls of apps, and their conversations."""
