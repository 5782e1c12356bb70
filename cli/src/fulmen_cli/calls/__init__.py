"""`fulmen calls` and `fulmen dataset`: recorded calls of an app, and data sets made of them."""
