"""The error of a person's input: one line that says what, where and what to do."""


class UserError(Exception):
    """Raised for anything that the user can put right. The command line prints it on one line."""
