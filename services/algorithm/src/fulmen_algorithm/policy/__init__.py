"""The policy of a run: its trainer, its published versions and what serves them. No wire, no database."""
