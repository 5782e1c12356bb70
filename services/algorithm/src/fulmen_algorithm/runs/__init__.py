"""Training runs: how they are created, checked, carried out, recorded and resumed. No wire, no database."""
