"""A call from its first byte to its capture, whatever the wire it came over."""
