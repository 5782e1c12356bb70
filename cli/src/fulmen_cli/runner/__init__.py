"""`fulmen runners` and `fulmen runner`: the fleet, and one runner."""
