"""Creates runs: checks of a request, what a run reads, and where it starts."""
