"""strategies room."""
