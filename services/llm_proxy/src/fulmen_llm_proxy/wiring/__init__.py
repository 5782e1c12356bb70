"""Creates the parts of the proxy: what all of it shares, and what a call goes through."""
