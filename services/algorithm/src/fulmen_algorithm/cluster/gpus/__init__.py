"""GPUs: which a machine has, which of them a run's models get, and which runs hold them."""
