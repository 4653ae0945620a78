"""JSON texts and files that need not be trusted, and files that get their names when they are whole."""
