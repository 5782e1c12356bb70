"""Peers in the same run as the store: Agent Lightning's store, and job queues on PostgreSQL."""
