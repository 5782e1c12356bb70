"""`fulmen proxy`: routes, backends and model calls."""
