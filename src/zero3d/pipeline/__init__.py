"""Pipeline parallelism: schedules, stages, what they send, forward passes without backward, failures."""
