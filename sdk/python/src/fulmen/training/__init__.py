"""What a training is made of, for the command line and the Python API: bundle, agent, tasks, algorithm, runs."""
