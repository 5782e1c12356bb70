"""`fulmen doctor` and `fulmen support-bundle`: what is wrong, and a file for whoever helps."""
