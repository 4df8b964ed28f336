import utils.installed  # noqa: F401 - before imports of what may be missing
