"""Why a run could not go on."""


class RunFailed(Exception):
    """Ends a run as FAILED; the text is for a person and goes to clients."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
