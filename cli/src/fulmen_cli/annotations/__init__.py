"""`fulmen annotations`: scores that people give to rollouts."""
