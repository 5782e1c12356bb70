"""The store: the queue of rollouts, their attempts, spans and resources, on PostgreSQL."""
