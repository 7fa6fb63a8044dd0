"""bien.core: the engine and every contract. Importing it stays light: no torch, no numpy-heavy work."""

__version__ = "0.1.0"
