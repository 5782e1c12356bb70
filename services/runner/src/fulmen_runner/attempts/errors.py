"""What can go wrong with an attempt before it has an outcome. None of these leaves the runner."""


class AgentFailed(Exception):
    """The agent or its grader failed, or they are not what their specification says; the text is for a person."""


class CapturesUnavailable(Exception):
    """The model proxy did not answer within its time."""


class ProgramUnavailable(Exception):
    """The agent's files could not be fetched, for no fault of the agent's."""


class AgentTimedOut(Exception):
    """A limit of time that the agent's own specification sets was passed, earlier than the attempt's."""


class HostUnavailable(Exception):
    """What runs the agent (an engine, a cluster) failed or is not there, for no fault of the agent's."""
