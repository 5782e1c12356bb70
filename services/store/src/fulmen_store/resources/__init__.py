"""Versioned resources, their aliases, the watch and garbage collection."""
