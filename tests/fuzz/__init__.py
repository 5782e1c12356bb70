"""Fuzzing: hostile inputs for everything that reads what others wrote.

`targets/` has one file per target; `python -m tests.fuzz` runs them, `corpus/` keeps the inputs that once failed and
those that reach far. docs/fuzzing.md says how to read the output and how to add a target.
"""
