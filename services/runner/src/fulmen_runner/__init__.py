"""The runner: leases attempts, runs agents, reports outcomes. It keeps nothing on disk that matters."""
