"""Coded computing for rewards and policy updates that do not wait for the slowest worker."""
