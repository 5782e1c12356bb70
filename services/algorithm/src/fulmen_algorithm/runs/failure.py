"""Why a run could not go on, or not with the trainer it had."""


class RunFailed(Exception):
    """Ends a run as FAILED; the text is for a person and goes to clients."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class TrainerLost(Exception):
    """What trained the run's weights has ended, or does not answer; the text is for a person and goes to clients."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
