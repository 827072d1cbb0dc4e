"""One file per command: it calls one library function and prints the result. No library module imports it."""
