"""The LLM proxy: one door between agents and models, which never loses a token id."""
