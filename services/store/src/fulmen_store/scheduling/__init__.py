"""Scheduling: what waits, in which order, and which runner gets it."""
