"""Creates the parts of the store: what the queue shares, and the servicers."""
