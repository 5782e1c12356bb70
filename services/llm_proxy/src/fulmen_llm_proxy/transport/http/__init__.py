"""The OpenAI API over HTTP: raw ASGI, no framework between the socket and the answer."""
