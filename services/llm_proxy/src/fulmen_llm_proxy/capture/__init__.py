"""Records model calls and delivers them to the store, through the disk while it is unavailable."""
