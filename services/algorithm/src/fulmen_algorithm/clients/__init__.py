"""The store, the LLM proxy and the engine, as the domain's ports; retries and deadlines are here."""
