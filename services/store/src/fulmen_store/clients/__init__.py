"""What the store calls: the other replicas."""
