"""gRPC servicers: decode, one call, encode."""
