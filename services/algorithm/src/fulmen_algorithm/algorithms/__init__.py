"""The algorithms: one file each, with a settings class and a `run` method."""
