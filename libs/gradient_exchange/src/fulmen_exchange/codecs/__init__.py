"""The codecs, one file each; what a file says in `ENTRIES` is found by its name."""
