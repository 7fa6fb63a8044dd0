"""Pure specifications of models: layers, KV groups, parameters. No torch."""
