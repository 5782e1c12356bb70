"""Spans of agents: instrumentors, processors, exporters."""
