"""The doors of the proxy: the OpenAI API over HTTP, control over gRPC."""
