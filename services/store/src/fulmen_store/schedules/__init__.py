"""Schedules: rollouts that are created at the times of a cron expression."""
