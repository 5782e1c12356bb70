"""A command agent that traces itself by the OpenTelemetry SDK alone: where the spans go is in its environment."""

import json
import os
import sys

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

task = json.load(sys.stdin)
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("planner")

with tracer.start_as_current_span("plan") as plan:
    plan.set_attribute("task.id", task["id"])
    # The key says whose spans these are: one that names another rollout is refused.
    if task["forged_rollout"]:
        plan.set_attribute("fulmen.rollout", task["forged_rollout"])
    with tracer.start_as_current_span("look-up"):
        print(f"attempt {os.environ['FULMEN_ATTEMPT']}")

provider.shutdown()
print(1)
