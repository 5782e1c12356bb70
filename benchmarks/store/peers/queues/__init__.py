"""One module for each queue, imported in the queues' own environment."""
