"""Other products' APIs on Fulmen, for programs that were written for them. Standard library only."""
