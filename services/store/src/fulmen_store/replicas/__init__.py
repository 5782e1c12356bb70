"""Replicas of the store: membership and the notifications between them."""
