"""`fulmen up`, `down`, `status`, `logs`: the local stack as a whole."""
