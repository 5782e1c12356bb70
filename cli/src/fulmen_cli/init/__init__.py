"""`fulmen init` and `fulmen demo`: an agent, its grader, tasks and a `train.toml` to start from."""
