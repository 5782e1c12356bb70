"""Files of a run for ranks whose machine does not see the run's folders."""
