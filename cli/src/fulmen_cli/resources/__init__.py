"""`fulmen resources`: versioned resources."""
