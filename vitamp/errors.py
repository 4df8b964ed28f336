"""The error that users can mend themselves."""


class UserError(Exception):
    """A problem found before the first update, in usage, settings, data or weights. Exit code 2.

    The text says what is wrong, where, and what to do.
    """
