"""The gRPC server of a service, and the edge around its handlers."""
