"""The wire of the `tinker` package over `TrainerService`: sessions, models, samplers, and answers that wait to be fetched."""
