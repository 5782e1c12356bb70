"""Recording of an app's own calls, which have no attempt: sampled, redacted, and kept in the store."""
