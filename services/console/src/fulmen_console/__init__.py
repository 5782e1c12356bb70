"""The console: rpcs of all services over HTTP, and sessions for browsers."""
