"""The store's gRPC services: decode, one call into the domain, encode."""
