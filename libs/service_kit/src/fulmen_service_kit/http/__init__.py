"""The HTTP server of a service, and its ASGI helpers."""
