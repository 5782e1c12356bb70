"""The connections to PostgreSQL, its migrations, the named statements and the group commit."""
