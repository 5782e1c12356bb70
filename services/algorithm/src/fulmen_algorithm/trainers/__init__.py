"""The trainers: in this process, or in a group of ranks."""
