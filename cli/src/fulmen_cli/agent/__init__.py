"""`fulmen agent check`: one agent, run once, with all that it did: models, recording and what is shown of it."""
