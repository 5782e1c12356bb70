"""Environments of others as agents with tasks; docs/environments.md. One file each, which imports its library when it is used."""
