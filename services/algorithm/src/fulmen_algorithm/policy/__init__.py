"""The policy of a run: trainer, published versions and serving. No wire, no database."""
