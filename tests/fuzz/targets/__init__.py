"""The targets, one per file; a file is named after its target."""
