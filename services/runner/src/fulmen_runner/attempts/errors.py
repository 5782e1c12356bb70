"""Errors inside an attempt. The executor turns each into an outcome."""


class AgentFailed(Exception):
    """The agent or its grader failed or is misconfigured. The text becomes the failure message."""


class CapturesUnavailable(Exception):
    """A model proxy did not answer in time."""


class ProgramUnavailable(Exception):
    """The agent's files could not be fetched; INFRA."""


class AgentTimedOut(Exception):
    """A deadline set by the agent's own specification passed before the attempt's timeout."""


class HostUnavailable(Exception):
    """The agent's host (Docker engine, cluster, model backend of a judge) failed or is absent; INFRA."""
