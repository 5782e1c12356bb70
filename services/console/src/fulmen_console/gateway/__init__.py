"""Rpcs of the services over HTTP."""
