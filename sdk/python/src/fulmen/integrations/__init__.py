"""Third-party environments as agents with tasks; docs/environments.md. Each file imports its library when it is used."""
