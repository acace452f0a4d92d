"""The one exception type whose message is written for the person who runs megarl."""


class UserError(Exception):
    """A wrong recipe, missing file, unfit run directory: the command line prints the message alone and exits with 2."""
