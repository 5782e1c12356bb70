"""`fulmen secret`: secrets of agents and keys of backends."""
