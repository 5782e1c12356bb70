"""Trainers that loops outside of the service drive: the primitives of training over gRPC."""
