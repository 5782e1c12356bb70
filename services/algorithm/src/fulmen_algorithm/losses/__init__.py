"""Advantages, losses and their settings."""
