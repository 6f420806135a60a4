"""A benchmark run as a page for people: HTML with plots, or Markdown to paste."""
