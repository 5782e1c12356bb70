"""Scheduling: the backlog, its order, and the assignment of rollouts to runners."""
