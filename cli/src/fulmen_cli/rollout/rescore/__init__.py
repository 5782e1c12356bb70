"""`fulmen rollout rescore`: scores stored rollouts with another grader."""
