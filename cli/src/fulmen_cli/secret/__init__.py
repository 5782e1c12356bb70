"""Secrets of a project."""
