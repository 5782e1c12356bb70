"""Guards: checks of the operator's own, before and after a call."""
