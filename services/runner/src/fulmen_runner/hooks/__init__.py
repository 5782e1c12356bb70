"""Hooks that come with the runner: `monitor:Monitor` and `alerts:Alerts`."""
