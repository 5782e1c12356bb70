"""The translators, and the path from one API to another: at most two steps, through chat completions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.translation.chat_to_messages import ChatToMessages
from fulmen_llm_proxy.translation.messages_to_chat import MessagesToChat
from fulmen_llm_proxy.translation.responses_to_chat import ResponsesToChat
from fulmen_llm_proxy.translation.translator import Translator

TRANSLATORS: Mapping[tuple[ApiName, ApiName], Callable[[], Translator]] = {
    (ApiName.RESPONSES, ApiName.CHAT): ResponsesToChat,
    (ApiName.MESSAGES, ApiName.CHAT): MessagesToChat,
    (ApiName.CHAT, ApiName.MESSAGES): ChatToMessages,
}
"""Translators by the caller's and the backend's API."""


def translation_path(caller: ApiName, served: Collection[ApiName]) -> tuple[ApiName, ...] | None:
    """Returns the APIs from the caller's to a served one, both included; None if there is no path.

    The shortest path wins; chat completions come first, since their tokens can be captured.
    """
    if caller in served:
        return (caller,)
    steps = [target for source, target in TRANSLATORS if source is caller]
    steps.sort(key=lambda name: name is not ApiName.CHAT)
    for step in steps:
        if step in served:
            return (caller, step)
    for step in steps:
        for source, target in TRANSLATORS:
            if source is step and target in served and target is not caller:
                return (caller, step, target)
    return None
