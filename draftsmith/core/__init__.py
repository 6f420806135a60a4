"""Pure maths: trees, sampling, verification, losses, theory. Knows no model."""
