"""Ways to run an agent: Python callables inside this process, commands as process groups."""
