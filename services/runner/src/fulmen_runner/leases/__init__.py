"""The lease stream to the store."""
