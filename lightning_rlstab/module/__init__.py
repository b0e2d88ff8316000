"""module room."""
