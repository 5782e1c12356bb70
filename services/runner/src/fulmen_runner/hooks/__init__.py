"""Hooks of the runner: `monitor:Monitor` and `alerts:Alerts`."""
