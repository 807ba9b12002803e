"""What is asked of an attention: its arguments, checked, and traced functions."""
