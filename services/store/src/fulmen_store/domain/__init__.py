"""Rules and background roles of the store; free of gRPC, protobuf and SQL."""
