"""Creates the parts of the proxy: shared parts, and the stages of a call."""
