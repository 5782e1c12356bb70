"""Rate limits, token budgets, usage and its cost."""
