"""The servers of the proxy: the model APIs over HTTP, control over gRPC."""
