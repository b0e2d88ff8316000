"""demo room."""
