"""Background roles that create partitions and remove expired rows."""
