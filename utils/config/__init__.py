"""The run's settings: schema, loading, checking. `load_config` is the door."""
