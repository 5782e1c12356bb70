"""The engines that serve a run's policy: started, supervised, given new weights."""
