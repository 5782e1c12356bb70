"""The attempts that calls belong to: who calls, and whether the attempt may still call."""
