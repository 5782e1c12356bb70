"""Stored responses of the Responses API: backends' responses, and responses that the proxy keeps in the store."""
