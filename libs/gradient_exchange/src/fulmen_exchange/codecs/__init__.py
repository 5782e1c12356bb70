"""The codecs, one file each; the entries in a file's `ENTRIES` are found by their names."""
