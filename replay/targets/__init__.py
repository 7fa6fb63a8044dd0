"""What a driver drives: a server over HTTP, or a gateway in the same process."""
