"""A run's rollouts: groups that are submitted, finished, admitted and read. No wire, no database."""
