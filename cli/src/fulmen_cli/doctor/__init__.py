"""`fulmen doctor` and `fulmen support-bundle`: diagnostics, and a file to share with others."""
