"""Benchmark of convergence: what every codec learns beside a dense exchange with as many steps."""
