"""The index holds itself to what the engines found: parity, drift, its cause, and what is done about it."""
