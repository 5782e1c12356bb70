"""Stored form of a project's rules: a serialized `fulmen.store.v1.QueueRules`; null means the defaults."""

from __future__ import annotations

from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.database.stored import read_column
from fulmen_store.scheduling.rules import DEFAULT_RULES, QueueRules

__all__ = ["decode_rules", "rules_message", "rules_of"]

_SWITCHES = ("match_labels", "affinity", "longest_first", "hedging", "weighted_share")


def decode_rules(stored: bytes | None) -> QueueRules:
    """Decodes stored rules; the defaults if they cannot be read."""
    message = read_column(pb.QueueRules, stored)
    return DEFAULT_RULES if message is None else rules_of(message)


def rules_of(message: pb.QueueRules) -> QueueRules:
    """Decodes rules; unset fields have their defaults."""
    given = {name: getattr(message, name) for name in _SWITCHES if message.HasField(name)}
    interval = message.ageing_interval
    if message.HasField("ageing_interval"):
        given["ageing_interval_s"] = interval.seconds + interval.nanos / 1e9
    return QueueRules(**given)


def rules_message(rules: QueueRules) -> pb.QueueRules:
    """Encodes rules with every field set."""
    message = pb.QueueRules(**{name: getattr(rules, name) for name in _SWITCHES})
    message.ageing_interval.FromNanoseconds(round(rules.ageing_interval_s * 1e9))
    return message
