"""Aggregation: rules that combine all client updates into one."""
