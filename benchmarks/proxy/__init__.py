"""The benchmark of the LLM proxy; see `__main__`."""
