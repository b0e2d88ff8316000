"""core room."""
