"""A Kubernetes cluster: its API, and readers of its documents."""
