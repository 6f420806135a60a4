"""Training drafters: the data, the trainer, the plan."""
