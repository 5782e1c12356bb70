"""Side effects that agents declare: begun once per rollout."""
