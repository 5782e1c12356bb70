"""The attempts that calls belong to: callers, and whether an attempt may still call."""
