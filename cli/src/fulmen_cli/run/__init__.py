"""`fulmen run`: training runs."""
