"""The local stack: an embedded PostgreSQL and the four services as child processes of one supervisor."""
