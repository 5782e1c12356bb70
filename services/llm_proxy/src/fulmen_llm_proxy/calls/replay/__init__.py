"""Attempts that continue where a lost one was: calls that the agent repeats are answered from its captured calls."""
