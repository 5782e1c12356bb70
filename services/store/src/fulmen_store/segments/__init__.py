"""Segments of spans: many chunks of a project and day in one object of the blob storage, and their places in PostgreSQL."""
