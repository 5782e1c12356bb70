"""The registry of live runners and the demand for more of them."""
