"""The files of runs."""
