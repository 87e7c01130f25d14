"""Ranks of a job: process groups, agreement before each action, liveness."""
