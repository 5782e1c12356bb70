"""`fulmen schedule`."""
