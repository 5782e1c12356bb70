"""Attempts that go on where a lost one was: its captured calls answer those that the agent repeats."""
