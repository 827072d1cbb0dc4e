"""One module per command: parse arguments, call one function, print."""
