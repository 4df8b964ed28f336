import utils.installed  # noqa: F401 - before all that may be missing
