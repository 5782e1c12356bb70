"""The store, chat models and child processes. Retries and timeouts of calls to other services are here."""
