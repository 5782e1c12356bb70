"""Groups as Jobs of a Kubernetes cluster."""
