"""What the proxy calls: model backends and the store."""
