"""The external scaler speaks KEDA's contract to the letter: package, service, names, numbers and types."""

from __future__ import annotations

from fulmen.keda import externalscaler_pb2

# As KEDA's externalscaler.proto has them: message, then field name, number and type of the descriptor.
STRING, INT64, DOUBLE, BOOL, MESSAGE = 9, 3, 1, 8, 11
MESSAGES = {
    "ScaledObjectRef": {("name", 1, STRING), ("namespace", 2, STRING), ("scalerMetadata", 3, MESSAGE)},
    "IsActiveResponse": {("result", 1, BOOL)},
    "GetMetricSpecResponse": {("metricSpecs", 1, MESSAGE)},
    "MetricSpec": {("metricName", 1, STRING), ("targetSize", 2, INT64), ("targetSizeFloat", 3, DOUBLE)},
    "GetMetricsRequest": {("scaledObjectRef", 1, MESSAGE), ("metricName", 2, STRING)},
    "GetMetricsResponse": {("metricValues", 1, MESSAGE)},
    "MetricValue": {("metricName", 1, STRING), ("metricValue", 2, INT64), ("metricValueFloat", 3, DOUBLE)},
}
RPCS = {
    "IsActive": ("ScaledObjectRef", "IsActiveResponse", False),
    "StreamIsActive": ("ScaledObjectRef", "IsActiveResponse", True),
    "GetMetricSpec": ("ScaledObjectRef", "GetMetricSpecResponse", False),
    "GetMetrics": ("GetMetricsRequest", "GetMetricsResponse", False),
}


def test_messages_and_rpcs_are_kedas() -> None:
    file = externalscaler_pb2.DESCRIPTOR
    assert file.package == "externalscaler"
    found = {
        name: {(field.name, field.number, field.type) for field in message.fields}
        for name, message in file.message_types_by_name.items()
    }
    assert found == MESSAGES
    service = file.services_by_name["ExternalScaler"]
    rpcs = {
        method.name: (method.input_type.name, method.output_type.name, method.server_streaming)
        for method in service.methods
    }
    assert rpcs == RPCS
    assert not any(method.client_streaming for method in service.methods)
    entry = file.message_types_by_name["ScaledObjectRef"].fields_by_name["scalerMetadata"].message_type
    assert entry.GetOptions().map_entry
    assert [field.type for field in entry.fields] == [STRING, STRING]
