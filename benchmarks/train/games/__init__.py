"""Five games of several turns with a tool, on which the defaults of reinforcement learning are chosen and tested."""
