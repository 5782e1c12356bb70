"""The algorithms: one file each, a strict settings class and a `run`."""
