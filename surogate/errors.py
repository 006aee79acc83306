"""The error of a person's input: one line that says what, where and what to do."""


class UserError(Exception):
    """Raised for anything that the user can put right. The command line prints it on one line."""


def reason(error: OSError) -> str:
    """What an OSError says, in lower case. NumPy's own, of a write cut short, has no number."""
    if error.strerror:
        return error.strerror.lower()
    return f"{error}; is the disk full?"
