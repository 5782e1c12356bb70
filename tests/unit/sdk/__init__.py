"""Unit tests of the SDK."""
