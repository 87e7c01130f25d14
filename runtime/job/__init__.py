"""The ranks of a job: process groups, agreement, liveness."""
