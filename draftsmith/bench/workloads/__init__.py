"""What is measured: prompts of the known data sets, the built-in set, and prompts of a wanted length."""
