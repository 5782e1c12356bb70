"""Stored responses of the Responses API: those of backends, and those that the proxy keeps in the store."""
