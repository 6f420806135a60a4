"""Published drafter checkpoints read into the layout of this package, and written from it."""
