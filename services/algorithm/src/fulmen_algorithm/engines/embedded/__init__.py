"""The embedded engine: an OpenAI-compatible server over a transformers model, run as a child process."""
