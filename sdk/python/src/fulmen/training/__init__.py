"""The parts of a training, for the command line and the Python API: bundle, agent, tasks, algorithm, runs."""
