"""A Kubernetes cluster: its API, and what its documents say."""
