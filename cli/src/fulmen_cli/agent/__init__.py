"""`fulmen agent check`: one agent, run in this process."""
