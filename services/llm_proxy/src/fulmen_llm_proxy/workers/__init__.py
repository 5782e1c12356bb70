"""Several processes behind one pair of ports."""
