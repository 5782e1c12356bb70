"""`fulmen agent`: one agent, run in this process; paused ones."""
