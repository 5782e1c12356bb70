"""Names of the spans and attributes that Fulmen's own emitters write. Other spans keep their names.

Source: `gen_ai.*`, `code.*` and `exception.*` are from OpenTelemetry's semantic conventions; a reward is written as
their evaluation result.
"""

from typing import Final

ROLLOUT: Final = "fulmen.rollout"
ATTEMPT: Final = "fulmen.attempt"
STEP: Final = "fulmen.step"
"""Agent step, from 0, of a span, or scored by a reward."""

SCOPE: Final = "fulmen"
"""The instrumentation scope of all spans below."""

REWARD_SPAN: Final = "fulmen.reward"
REWARD_DIMENSION: Final = "gen_ai.evaluation.name"
REWARD_VALUE: Final = "gen_ai.evaluation.score.value"
REWARD_SPAN_ID: Final = "fulmen.reward.span_id"
"""Id of the scored span, 16 hexadecimal digits; the reward's span also has a link to it."""

ANNOTATION_SPAN: Final = "fulmen.annotation"

MESSAGE_SPAN: Final = "fulmen.message"
MESSAGE_ROLE: Final = "fulmen.message.role"
MESSAGE_CONTENT: Final = "fulmen.message.content"

OBJECT_SPAN: Final = "fulmen.object"
OBJECT_NAME: Final = "fulmen.object.name"
OBJECT_TYPE: Final = "fulmen.object.type"
OBJECT_JSON: Final = "fulmen.object.json"

EXCEPTION_SPAN: Final = "fulmen.exception"

OPERATION_NAME: Final = "fulmen.operation.name"
OPERATION_ARGUMENTS: Final = "fulmen.operation.arguments"
OPERATION_RESULT: Final = "fulmen.operation.result"
OPERATION_ITEMS: Final = "fulmen.operation.items"
"""Number of items that a generator yielded."""
FUNCTION: Final = "code.function.name"
AGENT_NAME: Final = "gen_ai.agent.name"
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
INVOKE_AGENT: Final = "invoke_agent"

SPAN_COUNT: Final = "fulmen.span_count"
"""Number of spans stored in one batch."""

TRUNCATED: Final = "fulmen.truncated"
"""Whether part of the span was truncated."""

HOOK_SPAN: Final = "fulmen.hook"
HOOK_FAILED_EVENT: Final = "fulmen.hook.failed"
HOOK_NAME: Final = "fulmen.hook.name"
HOOK_POINT: Final = "fulmen.hook.point"
ERROR: Final = "exception.message"
