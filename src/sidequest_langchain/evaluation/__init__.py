"""Offline tasks that measure what a managed cache costs in quality; `sidequest eval` runs them."""
