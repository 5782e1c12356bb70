"""The processes of the LLM proxy that live, and their accounts of attempts."""
