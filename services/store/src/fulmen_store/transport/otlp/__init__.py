"""OTLP: spans of agents over gRPC and HTTP."""
