"""`fulmen rollout rescore`: stored rollouts under another grader, and where the scores are kept until all are there."""
