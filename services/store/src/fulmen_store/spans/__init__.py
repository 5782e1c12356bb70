"""Spans of attempts: chunks, filters and blob storage for large payloads."""
