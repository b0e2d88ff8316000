"""control room."""
