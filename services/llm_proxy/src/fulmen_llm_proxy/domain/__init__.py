"""Use cases and pure rules of the proxy; knows no socket, no gRPC, no protobuf."""
