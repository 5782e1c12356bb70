"""Spans of attempts: chunks, filters and the blob storage for large payloads."""
