"""What a failed call is answered: the vendor's own words, or the kind of failure; never a text of LiteLLM."""

import contextlib
import json
import re
from typing import Any, Final

import litellm

from fulmen_llm_proxy.backends.litellm.worker.egress import Call

__all__ = ["MAX_MESSAGE", "CallFailed", "document_of", "failure_of"]

MAX_MESSAGE: Final = 2000
_MIN_SECRET: Final = 8
_MAX_CAUSES: Final = 16


class CallFailed(Exception):
    """The answer to a failed call: status, code and message, none of which is taken from LiteLLM's own texts."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message

    def document(self) -> dict[str, Any]:
        """Returns the error in the form of OpenAI's API."""
        fault = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else fault
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


_PARAMETERS: Final = re.compile(r"parameters: [\[{]([^\]}]{1,500})[\]}]|Setting [\[{`]([^\]}`]{1,500})[\]}`]")


def failure_of(error: BaseException, call: Call, provider: str) -> CallFailed:
    """Returns what to answer for an exception: the vendor's own words if it answered, otherwise the kind of failure."""
    if isinstance(error, CallFailed):
        return error
    if call.led_elsewhere:
        text = f"Only {provider} itself can be reached: send images and files in the request, as data URLs."
        return CallFailed(400, "address_not_fetched", text)
    if call.too_large:
        return CallFailed(502, "answer_too_large", f"{provider} answered with more bytes than the proxy accepts.")
    if call.status >= 400:
        said = _message_of(document_of(call.body)) or f"{provider} answered {call.status}."
        return CallFailed(call.status, "vendor_refused", _masked(said, call.key)[:MAX_MESSAGE])
    if isinstance(error, litellm.UnsupportedParamsError):
        named = _PARAMETERS.search(str(error))
        names = ", ".join(re.findall(r"\w+", (named.group(1) or named.group(2)) if named else "")) or "some"
        text = (
            f"{provider} does not accept the parameters: {names}. With `drop_params` of the backend they are dropped."
        )
        return CallFailed(400, "unsupported_parameters", text)
    if call.late or isinstance(error, litellm.Timeout):
        return CallFailed(504, "vendor_timeout", f"{provider} did not answer in time.")
    if call.broken or any(isinstance(each, OSError) for each in _causes(error)):
        return CallFailed(503, "vendor_unreachable", f"{provider} cannot be reached, or interrupted its answer.")
    if call.status:
        return CallFailed(502, "answer_not_read", f"LiteLLM cannot read the answer of {provider}.")
    text = f"LiteLLM cannot make a call to {provider} from this request, or with the backend's key."
    return CallFailed(400, "not_expressible", text)


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and len(found) < _MAX_CAUSES:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _masked(text: str, key: str) -> str:
    """Returns a text without a key, or the parts of one that is a document."""
    for secret in (key, *document_of(key.encode()).values()):
        if isinstance(secret, str) and len(secret) >= _MIN_SECRET:
            text = text.replace(secret, "***")
    return text


def _message_of(document: dict[str, Any]) -> str:
    inner = document.get("error")
    places = (inner, document) if isinstance(inner, dict) else (document, {"message": inner})
    texts = [place.get(name) for place in places for name in ("message", "Message", "detail")]
    return next((text for text in texts if isinstance(text, str) and text), "")


def document_of(text: bytes) -> dict[str, Any]:
    """Returns a JSON object; an empty one if the text is anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}
