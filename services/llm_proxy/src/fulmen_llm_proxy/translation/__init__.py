"""Translators between APIs: an agent that speaks one is served by a backend that speaks another."""
