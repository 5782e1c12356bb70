"""The store's PostgreSQL: named SQL files, migrations and the repositories over them."""
