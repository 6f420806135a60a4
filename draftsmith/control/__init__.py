"""Draft budgets per request."""
