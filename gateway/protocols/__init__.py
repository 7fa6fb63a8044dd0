"""API dialects: bodies decoded and checked into an `Ask`, answers written back. No I/O, no tokenising."""
