"""Who calls a service and what they may do: tokens, roles, revocation, certificates, secrets and the audit log."""
