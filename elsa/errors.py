"""The one exception for what a user can put right; the command line prints it in one line and exits with 2."""


class UserError(ValueError):
    """Says what was given, what is allowed and what to change, and names the file or option."""
