"""The model APIs over HTTP, in plain ASGI."""
