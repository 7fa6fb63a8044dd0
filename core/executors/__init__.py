"""Executors run plans: `torch` computes, `simulated` asks a cost model."""
