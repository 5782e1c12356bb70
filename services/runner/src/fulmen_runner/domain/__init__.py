"""What an attempt is and what becomes of it. Imports no grpc, protobuf or HTTP."""
