"""Training runs: states, bookkeeping, the run loop's parts; knows no gRPC, no protobuf, no HTTP."""
