"""gradloc room."""
